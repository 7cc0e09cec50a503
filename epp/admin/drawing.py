"""Charts as SVG inside a page: small, without script, with a text for who does not see them or points at them.

Colours are the style sheet's: `a0` … `a9` fill, `line` and `area` belong to charts, `edge` keeps what is filled apart,
since no ten colours are far enough from each other for everybody. Geometry is in attributes, which
the page's content security policy allows; numbers are ours, every text is escaped.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from itertools import groupby
from math import isnan
from typing import Final, NamedTuple

from markupsafe import Markup

COLOURS: Final = 10
HEIGHT: Final = 24
"""Of a chart, in units of its drawing; it is stretched to the place it has."""
SQUARE: Final = 12
"""Pixels of one."""
BAR: Final = 200
"""Width of a bar, likewise."""
LEAST: Final = 0.05
"""Less of it is not drawn."""


class Term(NamedTuple):
    """Of bills. Its texts are escaped."""

    name: Markup
    colour: int
    meaning: Markup
    """What it is; empty: its plugin does not say."""
    segment: tuple[str, str, str]
    """Of a bar, what is always the same: the start up to its place, the text before its figure, all after that."""

    @classmethod
    def of(cls, name: str, number: int, meaning: str = "") -> "Term":
        """The one of this number in its bills, whose texts are not escaped yet."""
        colour, shown, about = number % COLOURS, escape(name), f": {escape(meaning)}" if meaning else ""
        segment = f'<rect class="a{colour}" x="', f"{shown} ", f" ms{about}</title></rect>"
        return cls(Markup(shown), colour, Markup(escape(meaning)), segment)


def line(values: Sequence[float], label: str, top: float | None = None) -> Markup:
    """`values` over time, oldest first, NaN: none. `top` is the value at the upper edge; None: the highest there is."""
    most = top or max((value for value in values if not isnan(value)), default=0.0)
    strokes = areas = ""
    for at, run in _runs(values, _heights(values, most)):
        points = _points(at, run)
        strokes += f"M{points}"
        areas += f"M{at},{HEIGHT}L{points}L{at + len(run) - 1},{HEIGHT}Z"
    inside = f'<path class="area" d="{areas}"/><path class="line" d="{strokes}"/>' if strokes else ""
    return _svg("chart", max(1, len(values) - 1), HEIGHT, escape(label), inside)


def stack(layers: Sequence[Sequence[float]], label: str, top: float = 1.0) -> Markup:
    """Several values over time on top of each other, the first lowest, each in its colour."""
    steps = len(layers[0])
    low = [0.0] * steps
    lower = _heights(low, top)
    inside = edges = ""
    for colour, layer in enumerate(layers):
        high = [under + (0.0 if isnan(value) else value) for under, value in zip(low, layer, strict=True)]
        upper = _heights(high, top)
        for at, run in _runs(layer, upper):
            back = "L".join([f"{n},{lower[n]}" for n in reversed(range(at, at + len(run)))])
            inside += f'<path class="a{colour}" d="M{_points(at, run)}L{back}Z"/>'
            if any(low[at : at + len(run)]) and any(layer[at : at + len(run)]):
                edges += f"M{back}"
        low, lower = high, upper
    return _svg("chart", max(1, steps - 1), HEIGHT, escape(label), inside + _edges(edges))


def spark(values: Sequence[int], most: int) -> str:
    """Points of a polyline for a table's cell: `values` of at most `most`, none of them unknown."""
    grid = _grid(len(values))
    return " ".join([column[min(value, most) * HEIGHT // most] for column, value in zip(grid, values, strict=True)])


@lru_cache(8)
def _grid(width: int) -> Sequence[Sequence[str]]:
    """Each point that a `spark` may have."""
    return [[f"{at},{HEIGHT - up}" for up in range(HEIGHT + 1)] for at in range(width)]


def bar(size: float, whole: float, label: str) -> Markup:
    """`whole` is the full width."""
    width = BAR * size / whole if whole > 0 else 0.0
    inside = f'<rect class="a0" x="0.0" width="{min(width, BAR):.1f}" height="10"/>' if width >= LEAST else ""
    return _svg("bar", BAR, 10, escape(label), inside)


def bill_bar(bill: Iterable[tuple[Term, float]], whole: float) -> Markup:
    """Terms side by side, in milliseconds, each with what it is where one points at it; `whole` is the full width."""
    scale = BAR / whole if whole > 0 else 0.0
    figures, inside, edges, at, left = [], "", "", 0.0, "0.0"
    for each, ms in bill:  # a hundred each second
        if not ms > 0:  # NaN too
            continue
        start, text, rest = each.segment
        text += f"{ms:.1f}"
        figures.append(text)
        width = ms * scale
        if not width >= LEAST or at >= BAR:
            continue
        inside += f'{start}{left}" width="{min(width, BAR - at):.1f}" height="10"><title>{text}{rest}'
        edges += f"M{left},0v10" if at else ""
        at += width
        left = f"{at:.1f}"
    return _svg("bar", BAR, 10, f"{', '.join(figures)} ms" if figures else "free", inside + _edges(edges))


def _edges(path: str) -> str:
    return f'<path class="edge" d="{path}"/>' if path else ""


def tiles(shades: Sequence[int | None], label: str, columns: int = 40) -> Markup:
    """A square for each endpoint, darker the more of ten parts it has; None: nothing is known of it."""
    drawn: dict[int | None, list[str]] = {}
    for shade, square in zip(shades, _squares(len(shades), columns), strict=True):
        drawn.setdefault(shade, []).append(square)
    squares = "".join(
        f'<path class="{"none" if shade is None else f"h{shade}"}" d="{"".join(some)}"/>'
        for shade, some in drawn.items()
    )
    rows = -(-len(shades) // columns) or 1
    width = min(columns, len(shades) or 1)
    return _svg("tiles", width * 10, rows * 10, escape(label), squares, f' width="{width * SQUARE}"')


@lru_cache(8)
def _squares(count: int, columns: int) -> Sequence[str]:
    return [f"M{at % columns * 10},{at // columns * 10}h9v9h-9z" for at in range(count)]


def _svg(
    kind: str, width: int, height: int, label: str, inside: str, size: str = ' preserveAspectRatio="none"'
) -> Markup:
    """`label` and `inside` are escaped."""
    return Markup(
        f'<svg class="{kind}" viewBox="0 0 {width} {height}"{size} role="img"><title>{label}</title>{inside}</svg>'
    )


_TENTHS: Final = [f"{tenths / 10}" for tenths in range(HEIGHT * 10 + 1)]


def _heights(values: Iterable[float], top: float) -> list[str]:
    """Where they are in a chart, from its upper edge; NaN is at the ground."""
    ground, scale = HEIGHT * 10, (HEIGHT - 1) * 10 / top if top > 0 else 0.0
    heights = []
    for value in values:  # some thousand, each few seconds
        up = value * scale
        heights.append(_TENTHS[int(ground - up + 0.5) if 0.0 < up < ground - 10 else 10 if up > 0.0 else ground])
    return heights


def _runs(values: Sequence[float], heights: Sequence[str]) -> Iterable[tuple[int, Sequence[str]]]:
    """Where known values begin, and their heights."""
    at = 0
    for unknown, group in groupby(map(isnan, values)):
        end = at + sum(1 for _ in group)
        if not unknown:
            yield at, heights[at:end]
        at = end


def _points(at: int, run: Sequence[str]) -> str:
    if len(run) == 1:  # a single value is a short line, or nothing would be seen of it
        return f"{at},{run[0]}h0.5"
    return "L".join([f"{n},{height}" for n, height in enumerate(run, at)])
