"""Charts as SVG inside a page: small, without script, with a text for who does not see them or points at them.

Colours are the style sheet's: `a0` … `a9` fill, `line` and `area` belong to charts, `edge` keeps what is filled apart,
since no ten colours are far enough from each other for everybody. Geometry is in attributes, which
the page's content security policy allows; numbers are ours, every text is escaped.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from math import isnan
from typing import Final, NamedTuple

from markupsafe import Markup, escape

COLOURS: Final = 10
HEIGHT: Final = 24
"""Of a chart, in units of its drawing; it is stretched to the place it has."""
SQUARE: Final = 12
"""Pixels of one."""
BAR: Final = 200
"""Width of a bar, likewise."""


class Part(NamedTuple):
    """Of a bar: how much of it, the colour's number, and what is said where one points at it."""

    size: float
    colour: int = 0
    label: str = ""


def line(values: Sequence[float], label: str, top: float | None = None) -> Markup:
    """`values` over time, oldest first, NaN: none. `top` is the value at the upper edge; None: the highest there is."""
    most = top or max((value for value in values if not isnan(value)), default=0.0)
    heights = [None if isnan(value) else _height(value, most) for value in values]
    runs = [*_runs(heights)]
    strokes = "".join(f"M{_points(at, run)}" for at, run in runs)
    areas = "".join(f"M{at},{HEIGHT}L{_points(at, run)}L{at + len(run) - 1},{HEIGHT}Z" for at, run in runs)
    inside = f'<path class="area" d="{areas}"/><path class="line" d="{strokes}"/>' if runs else ""
    return _svg("chart", max(1, len(values) - 1), HEIGHT, label, inside)


def stack(layers: Sequence[Sequence[float]], label: str, top: float = 1.0) -> Markup:
    """Several values over time on top of each other, the first lowest, each in its colour."""
    steps = len(layers[0])
    low = [0.0] * steps
    inside = edges = ""
    for colour, layer in enumerate(layers):
        high = [low[at] + (0.0 if isnan(value) else value) for at, value in enumerate(layer)]
        known = [None if isnan(value) else _height(high[at], top) for at, value in enumerate(layer)]
        for at, run in _runs(known):
            back = "L".join(f"{n},{_height(low[n], top)}" for n in reversed(range(at, at + len(run))))
            inside += f'<path class="a{colour}" d="M{_points(at, run)}L{back}Z"/>'
            if any(low[at : at + len(run)]) and any(layer[at : at + len(run)]):
                edges += f"M{back}"
        low = high
    return _svg("chart", max(1, steps - 1), HEIGHT, label, inside + _edges(edges))


def spark(values: Sequence[int], most: int) -> str:
    """Points of a polyline for a table's cell: `values` of at most `most`, none of them unknown."""
    grid = _grid(len(values))
    return " ".join([column[min(value, most) * HEIGHT // most] for column, value in zip(grid, values, strict=True)])


@lru_cache(8)
def _grid(width: int) -> Sequence[Sequence[str]]:
    """Each point that a `spark` may have."""
    return [[f"{at},{HEIGHT - up}" for up in range(HEIGHT + 1)] for at in range(width)]


def bar(parts: Iterable[Part], whole: float, label: str) -> Markup:
    """Parts side by side; `whole` is the full width."""
    inside, edges, at = "", "", 0.0
    for part in parts:
        width = BAR * part.size / whole if whole > 0 else 0.0
        if not width >= 0.05 or at >= BAR:  # NaN too
            continue
        place = f'class="a{part.colour % COLOURS}" x="{at:.1f}" width="{min(width, BAR - at):.1f}" height="10"'
        inside += f"<rect {place}><title>{escape(part.label)}</title></rect>" if part.label else f"<rect {place}/>"
        edges += f"M{at:.1f},0v10" if at else ""
        at += width
    return _svg("bar", BAR, 10, label, inside + _edges(edges))


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
    return _svg("tiles", width * 10, rows * 10, label, squares, f' width="{width * SQUARE}"')


@lru_cache(8)
def _squares(count: int, columns: int) -> Sequence[str]:
    return [f"M{at % columns * 10},{at // columns * 10}h9v9h-9z" for at in range(count)]


def _svg(
    kind: str, width: int, height: int, label: str, inside: str, size: str = ' preserveAspectRatio="none"'
) -> Markup:
    text = escape(label)
    return Markup(
        f'<svg class="{kind}" viewBox="0 0 {width} {height}"{size} role="img"><title>{text}</title>{inside}</svg>'
    )


def _height(value: float, top: float) -> float:
    share = min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
    return round(HEIGHT - (HEIGHT - 1) * share, 1)


def _runs(heights: Sequence[float | None]) -> Iterable[tuple[int, list[float]]]:
    """Where known values begin, and they."""
    at = 0
    for known, group in groupby(heights, lambda height: height is not None):
        run = [*group]
        if known:
            yield at, [height for height in run if height is not None]
        at += len(run)


def _points(at: int, run: Sequence[float]) -> str:
    if len(run) == 1:  # a single value is a short line, or nothing would be seen of it
        return f"{at},{run[0]}h0.5"
    return "L".join(f"{n},{height}" for n, height in enumerate(run, at))
