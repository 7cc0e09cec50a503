"""Text from outside (clients, model servers, files) made safe for a terminal."""


def printable(text: str) -> str:
    """`text` on one line, with Python's escapes for whatever a terminal would not show as a character.

    Escaped are control characters (C0, DEL, C1), line and paragraph separators, bidirectional and other format
    controls, spaces that are not U+0020, unassigned and private characters, and surrogates, which cannot be encoded.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """The same, line by line: for texts whose line breaks are ours."""
    return "\n".join(map(printable, text.split("\n")))
