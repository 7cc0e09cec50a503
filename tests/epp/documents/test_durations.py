import pytest

from epp.documents.durations import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0s", 0),
        ("200ms", 0.2),
        ("1m30s", 90),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("2.s", 2),
        ("3us4µs5μs", 12e-6),
        ("7ns", 7e-9),
        ("1h1h", 7200),
        ("2562047h", 2562047 * 3600),
    ],
)
def test_durations_are_those_of_go(text: str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "s",
        "5 s",
        "-5s",
        "+5s",
        "1d",
        "1e3s",
        ".s",
        "1..s",
        "٣s",
        "5s\n",
        "3000000h",
        "9" * 400 + "s",
        "1s" * 33,
    ],
)
def test_what_is_no_duration_of_go_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        seconds_of(text)
