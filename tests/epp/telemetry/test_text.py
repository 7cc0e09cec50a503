import sys
import unicodedata

import pytest

from epp.telemetry.text import printable, printable_lines


@pytest.mark.parametrize("text", ["", "plain [bold] :smile: \\x1b", "Grüße, 東京, 😀"])
def test_what_prints_stays(text: str) -> None:
    assert printable(text) is text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\r\nb\tc\x7f", "a\\r\\nb\\tc\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egpj.exe\u2066", "\\u202egpj.exe\\u2066"),
        ("\u2028\u2029\ufeff\u200b", "\\u2028\\u2029\\ufeff\\u200b"),
        ("\udc9b", "\\udc9b"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_what_does_not_print_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_no_control_character_of_any_kind_is_left() -> None:
    everything = printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert everything.isprintable()
    assert not {"Cc", "Cf", "Cs", "Zl", "Zp"} & {unicodedata.category(c) for c in set(everything)}
    everything.encode()  # and all of it can be written


def test_line_breaks_of_ours_stay() -> None:
    assert printable_lines("a: \x1b\nb: \x0b\n") == "a: \\x1b\nb: \\x0b\n"
