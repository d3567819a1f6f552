"""Curves and links as inline SVG: pictures that need no program to be seen and none to be made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 34
POINTS = 400
"""Points of a curve that are drawn; more would lie on the same pixels."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 1
    """Which of the page's colours, from 1."""
    dots: bool = False
    """Mark each point; for few."""


def line_chart(series: Sequence[Series], x_label: str, y_label: str, from_zero: bool = False) -> str:
    """The curves in one frame with shared axes; a chart without a point says so."""
    drawn = [thinned(curve) for curve in series if len(curve.xs)]
    if not drawn:
        return '<p class="none">nothing recorded</p>'
    xs = [x for curve in drawn for x in curve.xs]
    ys = [y for curve in drawn for y in curve.ys]
    x_ticks = ticks(min(0.0, *xs), max(xs))
    y_ticks = ticks(min(0.0, *ys) if from_zero else min(ys), max(ys))
    x_low, x_high = min(0.0, *xs), max(*xs, 1.0)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM),
        )

    name = escape(f"{y_label} by {x_label}")
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">']
    for y in y_ticks:
        _, py = place(x_low, y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{py + 3.5:.1f}" text-anchor="end">{number(y)}</text>')
    for x in x_ticks:
        if x_low <= x <= x_high:
            px, _ = place(x, y_low)
            parts.append(
                f'<text class="tick" x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(x)}</text>'
            )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(x_label)}</text>'
    )
    for curve in drawn:
        points = [place(x, y) for x, y in zip(curve.xs, curve.ys, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline class="curve c{curve.colour}" points="{path}"/>')
        shown = len(points) == 1 or curve.dots
        for (px, py), x, y in zip(points, curve.xs, curve.ys, strict=True):
            # Points that cannot be seen still answer the pointer: a plain SVG title is the tool tip.
            title = escape(f"{curve.label} {number(y, 4)} at {number(x, 6)}")
            parts.append(
                f'<circle class="{"dot" if shown else "spot"} c{curve.colour}" cx="{px:.1f}" cy="{py:.1f}" '
                f'r="{3 if shown else 5}"><title>{title}</title></circle>'
            )
    parts.append("</svg>")
    legend = "".join(f'<span><i class="c{curve.colour}"></i>{escape(curve.label)}</span>' for curve in drawn)
    return f'{"".join(parts)}<p class="legend">{legend}</p>'


def links_picture(source: Sequence[str], target: Sequence[str], links: Sequence[int | None]) -> str:
    """The target's tokens under the source's, joined where `links[target] = source`."""
    gap, unit = 14, 9
    widths = [[display_width(piece) * unit + gap for piece in row] for row in (source, target)]
    total = max(sum(row) for row in widths) + gap
    centres = []
    for row in widths:
        at, places = (total - sum(row)) / 2, []
        for width in row:
            places.append(at + width / 2)
            at += width
        centres.append(places)
    parts = [
        f'<svg class="links" viewBox="0 0 {total:.0f} 130" style="max-width:{total:.0f}px" role="img" '
        'aria-label="alignment of target tokens to source tokens">'
    ]
    for i, j in enumerate(links):
        if j is not None:
            x1, x2 = centres[0][j], centres[1][i]
            parts.append(
                f'<path class="link" d="M{x1:.1f},30 C{x1:.1f},70 {x2:.1f},60 {x2:.1f},98">'
                f"<title>{escape(target[i])} looks at {escape(source[j])}</title></path>"
            )
    for pieces, places, y in ((source, centres[0], 20), (target, centres[1], 116)):
        for piece, x in zip(pieces, places, strict=True):
            parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(piece)}</text>')
    parts.append("</svg>")
    return "".join(parts)


def thinned(curve: Series) -> Series:
    """At most `POINTS` points: means of neighbours, so that a long curve keeps its course and the last point its x."""
    n = len(curve.xs)
    if n <= POINTS:
        return curve
    edges = [round(i * n / POINTS) for i in range(POINTS + 1)]
    xs = [curve.xs[end - 1] for end in edges[1:]]
    ys = [math.fsum(curve.ys[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    return Series(curve.label, xs, ys, curve.colour, curve.dots)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that enclose [low, high]."""
    if not high > low:
        low, high = (low - 0.5, low + 0.5) if low == high == 0 else (low - abs(low) * 0.1, high + abs(high) * 0.1)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float, digits: int = 3) -> str:
    """A number for an axis: 12,000 · 0.35 · 7.0e-4."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}"


def display_width(text: str) -> int:
    """Columns that a text takes: ideographs and full-width forms two."""
    return sum(
        2 if ord(letter) >= 0x1100 and letter != "▁" and not 0x2000 <= ord(letter) < 0x2E80 else 1 for letter in text
    )
