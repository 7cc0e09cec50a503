"""Text from outside (clients, model servers, files) made safe for a terminal."""


def printable(text: str, longest: int | None = None) -> str:
    """`text` on one line, with Python's escapes for whatever a terminal would not show as a character.

    Of more than `longest` characters, where that is given, the first are shown, and an ellipsis.

    Escaped are control characters (C0, DEL, C1), line and paragraph separators, bidirectional and other format
    controls, spaces that are not U+0020, unassigned and private characters, and surrogates, which cannot be encoded.
    """
    if longest is not None and len(text) > longest:
        text = text[:longest] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """The same, line by line: for texts whose line breaks are ours."""
    return "\n".join(map(printable, text.split("\n")))
