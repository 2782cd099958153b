"""Plots as inline SVG: no library, no network. The page's script shows values and hides what is clicked away."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 16.0, 34.0, 48.0
COLORS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f")
MOST_POINTS = 200
"""Points of a line that are drawn; of more, evenly spaced ones."""


class Series(NamedTuple):
    """Points of one cache: name, (x, y) pairs, and whether a line joins them."""

    name: str
    points: Sequence[tuple[float, float]]
    line: bool


class Axis(NamedTuple):
    """A label, and whether it is logarithmic."""

    label: str
    log: bool


class _Scale(NamedTuple):
    """From values to pixels."""

    axis: Axis
    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        position = (_of(value, self.axis) - self.low) / (self.high - self.low)
        return self.start + position * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if self.axis.log:
            step = max(1, math.ceil((self.high - self.low) / 8))
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1, step)]
        rough = (self.high - self.low) / 6
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step_size = next(of * magnitude for of in (1, 2, 5, 10) if of * magnitude >= rough)
        first = math.ceil(self.low / step_size)
        return [number * step_size for number in range(first, math.floor(self.high / step_size) + 1)]


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """An SVG element with axes, points and a legend; values that are not finite are left out."""
    series = [of._replace(points=[point for point in of.points if all(map(math.isfinite, point))]) for of in series]
    every = [point for of in series for point in of.points]
    if not every:
        return ""
    across = _scale(x, [point[0] for point in every], LEFT, WIDTH - RIGHT)
    up = _scale(y, [point[1] for point in every], HEIGHT - BOTTOM, TOP)
    height = HEIGHT + 18 * len(series)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        f'<text x="{WIDTH / 2}" y="18" class="title">{escape(title)}</text>',
        *_grid(across, up),
        *(line for place, of in enumerate(series) for line in _drawn(of, place, across, up)),
        *(line for place, of in enumerate(series) for line in _legend(of, place)),
        "</svg>",
    ]
    return "\n".join(parts)


def heat_color(value: float) -> str:
    """From dark blue (0) over green to yellow (1)."""
    stops = ((68, 1, 84), (33, 145, 140), (253, 231, 37))
    at = min(max(value, 0.0), 1.0) * 2
    low, high = stops[min(int(at), 1)], stops[min(int(at), 1) + 1]
    share = at - min(int(at), 1)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True))


def _of(value: float, axis: Axis) -> float:
    return math.log10(value) if axis.log else value


def _scale(axis: Axis, values: Sequence[float], start: float, stop: float) -> _Scale:
    low, high = min(_of(value, axis) for value in values), max(_of(value, axis) for value in values)
    low = low if axis.log else min(low, 0.0)
    room = 0.06 * (high - low) or 0.5
    return _Scale(axis, low - room if axis.log else low, high + room, start, stop)


def _grid(across: _Scale, up: _Scale) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in across.ticks():
        at = across(value)
        yield f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 16}" class="tick middle">{value:.4g}</text>'
    for value in up.ticks():
        at = up(value)
        yield f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" class="tick end">{value:.3g}</text>'
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}"/>'
    yield f'<text x="{(LEFT + right) / 2}" y="{bottom + 38}" class="tick middle">{escape(across.axis.label)}</text>'
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    yield f'<text x="14" y="{middle}" class="tick middle" {turned}>{escape(up.axis.label)}</text>'


def _drawn(series: Series, place: int, across: _Scale, up: _Scale) -> Iterator[str]:
    if not series.points:
        return
    color = COLORS[place % len(COLORS)]
    step = max(1, math.ceil(len(series.points) / MOST_POINTS))
    points = [series.points[at] for at in sorted({*range(0, len(series.points), step), len(series.points) - 1})]
    yield f'<g class="series" data-series="{place}" stroke="{color}" fill="{color}">'
    if series.line:
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke-width="2"/>'
    for x, y in points:
        tip = escape(f"{series.name}: {across.axis.label} {x:.4g}, {up.axis.label} {y:.4g}")
        size = 4 if series.line else 6
        seen = ' class="hidden-dot"' if series.line else ""
        yield f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="{size}"{seen} data-tip="{tip}"/>'
    yield "</g>"


def _legend(series: Series, place: int) -> Iterator[str]:
    at = HEIGHT + 18 * place + 8
    color = COLORS[place % len(COLORS)]
    yield f'<g class="legend" data-series="{place}" tabindex="0" role="button" aria-pressed="true">'
    yield f'<rect x="{LEFT}" y="{at - 9}" width="12" height="12" fill="{color}"/>'
    yield f'<text x="{LEFT + 20}" y="{at + 2}" class="tick">{escape(series.name)}</text></g>'
