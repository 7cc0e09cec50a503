import re
from xml.etree import ElementTree

import pytest

from tooling.replay.plots import bars, colour, curves, legend


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def lengths(svg: str) -> list[float]:
    return [float(rect.get("width", "")) for rect in parsed(svg).iter("rect")]


def points(svg: str, name: str) -> list[tuple[str, float, float]]:
    for path in parsed(svg).iter("path"):
        title = path.find("title")
        if title is not None and title.text == name:
            found = re.findall(r"([ML])([\d.]+) ([\d.]+)", path.get("d", ""))
            return [(letter, float(x), float(y)) for letter, x, y in found]
    raise AssertionError(f"no curve {name}")


def test_bars_are_as_long_as_their_values() -> None:
    first, second, third = lengths(bars([("a", 10.0, 0.0), ("b", 5.0, 0.0), ("c", 0.0, 0.0)], ".1f"))
    assert second == pytest.approx(first / 2, abs=0.2)
    assert third == 1.0, "nothing is still seen"


def test_bars_show_names_values_spread_and_bound() -> None:
    svg = bars([("<mine>", 10.0, 2.0), ("b", 5.0, 0.0)], ".1f", bound=20.0)
    texts = [text.text for text in parsed(svg).iter("text")]
    assert texts == ["<mine>", "10.0", "b", "5.0"]
    assert len(list(parsed(svg).iter("path"))) == 2, "one for the spread, one for the bound"
    assert max(lengths(svg)) < 140, "the bound is within the picture"


def test_all_zero_is_drawn_too() -> None:
    assert lengths(bars([("a", 0.0, 0.0)], ".0f")) == [1.0]
    parsed(curves([("a", [0.0, 0.0])], "x", "y"))
    parsed(curves([], "x", "y"))


def test_a_curve_rises_with_its_values_on_a_logarithmic_scale() -> None:
    svg = curves([("a", [0.01, 0.1, 1.0])], "of the requests", "TTFT, s")
    (_, x0, y0), (_, x1, y1), (_, x2, y2) = points(svg, "a")
    assert x0 < x1 < x2
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1


def test_gaps_are_left_open() -> None:
    svg = curves([("a", [1.0, -1.0, 2.0, 3.0])], "x", "y")
    assert [letter for letter, _, _ in points(svg, "a")] == ["M", "M", "L"]


def test_policies_keep_their_colours() -> None:
    text = legend(["a", "<b>"])
    assert colour(0) in text
    assert colour(1) in text
    assert "&lt;b&gt;" in text
    assert colour(0) == colour(8)
