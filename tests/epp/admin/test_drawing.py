import re
from html.parser import HTMLParser
from math import inf, nan

import pytest

from epp.admin.drawing import BAR, HEIGHT, Term, bar, bill_bar, line, spark, stack, tiles


class Svg(HTMLParser):
    """Its elements with their attributes, and the text of its title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.title = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.title += data

    def all(self, tag: str, attribute: str) -> list[str | None]:
        return [attributes.get(attribute) for found, attributes in self.elements if found == tag]


def numbers(path: str | None) -> list[float]:
    return [float(each) for each in re.findall(r"[\d.]+", path or "")]


def test_a_line_reaches_from_the_ground_to_the_highest_value() -> None:
    drawn = Svg(line([0.0, 5.0, 10.0], "requests"))
    assert drawn.title == "requests"
    area, stroke = drawn.all("path", "d")
    assert stroke == f"M0,{HEIGHT}.0L1,12.5L2,1.0"
    assert area == f"M0,{HEIGHT}L0,{HEIGHT}.0L1,12.5L2,1.0L2,{HEIGHT}Z"


def test_a_line_keeps_its_gaps_and_shows_a_single_value() -> None:
    _, stroke = Svg(line([nan, 1.0, nan, 1.0, 1.0], "x")).all("path", "d")
    assert stroke == "M1,1.0h0.5M3,1.0L4,1.0"
    assert Svg(line([nan, nan], "x")).all("path", "d") == []
    assert Svg(line([0.0, 0.0], "x")).all("path", "d")[1] == f"M0,{HEIGHT}.0L1,{HEIGHT}.0"


def test_what_is_above_the_top_is_drawn_at_it() -> None:
    assert Svg(line([0.5, 3.0], "share", 1.0)).all("path", "d")[1] == "M0,12.5L1,1.0"


def test_layers_lie_on_each_other() -> None:
    drawn = Svg(stack([[0.5, 0.5], [0.25, nan], [0.25, 0.0]], "tiers"))
    lowest, middle, highest, edges = drawn.all("path", "d")
    assert (lowest, middle) == ("M0,12.5L1,12.5L1,24.0L0,24.0Z", "M0,6.8h0.5L0,12.5Z")
    assert highest == "M0,1.0L1,12.5L1,12.5L0,6.8Z"
    assert edges == "M0,12.5M1,12.5L0,6.8"  # below what lies on something
    assert drawn.all("path", "class") == ["a0", "a1", "a2", "edge"]


def test_a_bar_is_as_long_as_its_parts_are_of_the_whole() -> None:
    drawn = Svg(bar(25, 100, "a quarter"))
    assert drawn.title == "a quarter"
    assert drawn.all("rect", "class") == ["a0"]
    assert drawn.all("rect", "width") == [f"{BAR / 4:.1f}"]
    for size, whole in ((0.0, 1.0), (1.0, 0.0), (0.01, 100.0)):
        assert Svg(bar(size, whole, "nothing")).all("rect", "width") == []


def terms(*names: str) -> list[Term]:
    return [Term.of(name, at) for at, name in enumerate(names)]


def test_terms_of_a_bill_lie_side_by_side() -> None:
    own, wait, stall = terms("own", "wait", "stall")
    drawn = Svg(bill_bar([(own, 25.0), (wait, 0.0), (stall, 50.0)], 100))
    assert drawn.title == "own 25.0, stall 50.0 ms" + "own 25.0 ms" + "stall 50.0 ms"
    assert drawn.all("rect", "class") == ["a0", "a2"]
    assert drawn.all("rect", "x") == ["0.0", f"{BAR / 4:.1f}"]
    assert drawn.all("rect", "width") == [f"{BAR / 4:.1f}", f"{BAR / 2:.1f}"]
    assert drawn.all("path", "d") == [f"M{BAR / 4:.1f},0v10"]
    assert Svg(bill_bar([(own, 25.0)], 100)).all("path", "d") == []
    assert Svg(bill_bar([(own, 0.0)], 0.0)).title == "free"
    small = Svg(bill_bar([(own, 0.01), (stall, 100.0)], 100))
    assert small.title == "own 0.0, stall 100.0 ms" + "stall 100.0 ms"  # a term too small to be seen is still named


@pytest.mark.parametrize("size", [nan, inf, 1e300])
def test_a_bar_stays_in_its_place_whatever_a_plugin_says(size: float) -> None:
    first, second, third = terms("first", "second", "third")
    drawn = Svg(bill_bar([(first, 1.0), (second, size), (third, 1.0)], 2))
    widths = [numbers(width)[0] for width in drawn.all("rect", "width")]
    assert BAR / 2 <= sum(widths) <= BAR
    for one in (bar(size, size, "x"), bill_bar([(first, size)], size)):
        assert Svg(one).all("rect", "width") in ([], [f"{BAR}.0"])


@pytest.mark.parametrize("value", [inf, 1e300, -1.0, -inf])
def test_a_chart_stays_in_its_place_whatever_a_plugin_says(value: float) -> None:
    for drawn in (line([0.5, value, 1.0], "x", 1.0), line([0.5, value], "x"), stack([[0.5, value, 1.0]], "x")):
        for path in Svg(drawn).all("path", "d"):
            assert "nan" not in str(path)
            assert "inf" not in str(path)
            assert all(0 <= number <= HEIGHT for number in numbers(path))


def test_a_square_for_each_endpoint() -> None:
    drawn = Svg(tiles([None, 9, 0, 9], "three of four are known", columns=3))
    squares = dict(zip(drawn.all("path", "class"), drawn.all("path", "d"), strict=True))
    assert squares == {"none": "M0,0h9v9h-9z", "h9": "M10,0h9v9h-9zM0,10h9v9h-9z", "h0": "M20,0h9v9h-9z"}
    assert drawn.all("svg", "viewbox") == ["0 0 30 20"]
    assert "<path" not in tiles([], "none")


def test_points_of_a_cell_end_at_the_edges() -> None:
    assert spark([0, 4, 8, 100], 8) == f"0,{HEIGHT} 1,{HEIGHT // 2} 2,0 3,0"


def test_a_text_of_somebody_else_stays_a_text() -> None:
    for drawn in (line([1.0], "<b>&"), bar(0, 0, "<b>&"), tiles([1], "<b>&")):
        assert "<title>&lt;b&gt;&amp;</title>" in drawn
    drawn = bill_bar([(Term.of("<b>&", 0, "<i>"), 1.0)], 1.0)
    assert Svg(drawn).title == "<b>& 1.0 ms" + "<b>& 1.0 ms: <i>"
    assert {tag for tag, _ in Svg(drawn).elements} == {"svg", "title", "rect"}
