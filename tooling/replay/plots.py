"""Small plots as inline SVG: no script, no font and no file from elsewhere."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final

COLOURS: Final = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#846358", "#495057", "#f08c00")
"""By policy, in the order of the table; distinguishable for people who see few colours, too, by their labels."""
_WIDTH: Final = 460
_HEIGHT: Final = 260
_LEFT: Final = 58
_BOTTOM: Final = 34
_TOP: Final = 12
_RIGHT: Final = 22

Series = tuple[str, Sequence[float]]
"""Name and values."""


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def bars(rows: Sequence[tuple[str, float, float]], form: str, *, bound: float | None = None) -> str:
    """A bar for each (name, value, deviation), longest to the right; `bound` is drawn as a line."""
    most = max([value + deviation for _, value, deviation in rows] + [bound or 0.0]) or 1.0
    height, left, right = 26 * len(rows) + 8, 130, 74
    scale = (_WIDTH - left - right) / most
    parts = []
    for number, (name, value, deviation) in enumerate(rows):
        y = 6 + 26 * number
        length = max(1.0, value * scale)
        parts.append(f'<text x="{left - 6}" y="{y + 14}" text-anchor="end">{escape(name[:22])}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="19" fill="{colour(number)}"/>')
        if deviation:
            a, b = left + (value - deviation) * scale, left + (value + deviation) * scale
            parts.append(f'<path d="M{a:.1f} {y + 9.5}H{b:.1f}" stroke="#212529" stroke-width="1.5"/>')
        parts.append(f'<text x="{left + (value + deviation) * scale + 5:.1f}" y="{y + 14}">{value:{form}}</text>')
    if bound is not None:
        x = left + bound * scale
        parts.append(f'<path d="M{x:.1f} 2V{height - 2}" stroke="#212529" stroke-dasharray="4 3"/>')
    return _svg(height, parts)


def curves(series: Sequence[Series], across: str, up: str) -> str:
    """Values over 0 to 100 % of something, on a logarithmic scale; negative values leave a gap."""
    values = [value for _, own in series for value in own if value > 0]
    low = floor(log10(min(values, default=0.01)))
    high = max(low + 1, ceil(log10(max(values, default=1.0))))
    inner, deep = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def y(value: float) -> float:
        return _TOP + deep * (high - log10(max(value, 10.0**low))) / (high - low)

    parts = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#dee2e6"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for share in (0, 25, 50, 75, 100):
        at = _LEFT + inner * share / 100
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{share} %</text>')
    parts.append(f'<text x="{_LEFT + inner / 2}" y="{_HEIGHT - 3}" text-anchor="middle">{escape(across)}</text>')
    parts.append(f'<text x="{_LEFT + 4}" y="{_TOP + 15}" fill="#495057">{escape(up)}</text>')
    for number, (name, own) in enumerate(series):
        path, gap = [], True
        for place, value in enumerate(own):
            if value < 0:
                gap = True
                continue
            path.append(f"{'M' if gap else 'L'}{_LEFT + inner * place / (len(own) - 1 or 1):.1f} {y(value):.1f}")
            gap = False
        parts.append(
            f'<path d="{"".join(path)}" fill="none" stroke="{colour(number)}" stroke-width="2">'
            f"<title>{escape(name)}</title></path>"
        )
    return _svg(_HEIGHT, parts)


def legend(names: Sequence[str]) -> str:
    """Which colour is whose."""
    return " ".join(
        f'<span class="key"><i style="background:{colour(number)}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'
