"""Curves as small SVG pictures that fit into a page of text."""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT = 330, 160
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 26, 24
MOST_POINTS = 160
"""Of a curve: more cannot be told apart, and a page has to stay small."""

COLOURS = ("#0072b2", "#d55e00", "#009e73")

LARGEST = 1e100
"""Beyond it sums and spans of an axis may overflow."""

Points = Sequence[tuple[float, float]]


def drawable(value: Any) -> bool:
    """Whether ``value`` is a number that an axis can hold."""
    return isinstance(value, int | float) and abs(value) < LARGEST  # which NaN is not


def image(title: str, curves: Mapping[str, Points]) -> str:
    """Markdown of a picture of the named curves; the text is its own file."""
    data = base64.b64encode(draw(title, curves).encode()).decode()
    return f"![{title}](data:image/svg+xml;base64,{data})"


def draw(title: str, curves: Mapping[str, Points]) -> str:
    """An SVG document. Points that no axis can hold are left out."""
    kept = {name: _thinned(points) for name, points in curves.items()}
    every = [point for points in kept.values() for point in points]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="15" font-size="12" font-weight="bold">{_text(title)}</text>',
    ]
    if every:
        box = _box(every)
        parts += _axes(box)
        for colour, points in zip(COLOURS, kept.values(), strict=False):
            parts.append(_curve(points, box, colour))
        parts += _legend(list(kept)) if len(kept) > 1 else []
    return "".join([*parts, "</svg>"])


def _thinned(points: Points) -> Points:
    """The mean of each of at most MOST_POINTS equal groups, which also calms a noisy curve."""
    kept = [point for point in points if all(map(drawable, point))]
    size = math.ceil(len(kept) / MOST_POINTS)
    groups = [kept[i : i + size] for i in range(0, len(kept), size or 1)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _box(points: Points) -> tuple[float, float, float, float]:
    """(least x, greatest x, least y, greatest y), none of the two spans empty."""
    steps, values = [x for x, _ in points], [y for _, y in points]
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return min(steps), max(max(steps), min(steps) + 1), low - room, high + room


def _place(
    point: tuple[float, float], box: tuple[float, float, float, float]
) -> tuple[float, float]:
    first, last, low, high = box
    across = (point[0] - first) / (last - first) * (WIDTH - LEFT - RIGHT)
    up = (point[1] - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
    return LEFT + across, HEIGHT - BOTTOM - up


def _curve(points: Points, box: tuple[float, float, float, float], colour: str) -> str:
    placed = [_place(point, box) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    style = f'fill="none" stroke="{colour}" stroke-width="1.6"'
    if len(placed) == 1:
        return f'<circle cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" r="2.5" fill="{colour}"/>'
    return f'<polyline points="{line}" {style}/>'


def _axes(box: tuple[float, float, float, float]) -> list[str]:
    first, last, low, high = box
    parts = []
    for share in (0.0, 0.5, 1.0):
        value, step = low + share * (high - low), first + share * (last - first)
        x, y = _place((step, value), box)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e2e2e2"/>'
            f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#555">'
            f"{_short(value)}</text>"
            f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle" fill="#555">{step:.0f}</text>'
        )
    return parts


def _short(value: float) -> str:
    """``1.51k`` for what would not fit beside the axis."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], WIDTH - RIGHT
    for colour, name in reversed(list(zip(COLOURS, names, strict=False))):
        parts.append(f'<text x="{x}" y="15" text-anchor="end" fill="{colour}">{_text(name)}</text>')
        x -= 8 + 6 * len(name)
    return parts


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
