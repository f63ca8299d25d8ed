"""Plots as SVG text, so that a bench needs no plotting library: lines, points or bars, in panels side by side.

Contract: every panel has a title, named axes with their units, ticks, and a legend where it has several series. All
that is drawn lies inside the picture. Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#b8a900")
WIDTH, HEIGHT = 480, 330
LEFT, RIGHT, BOTTOM = 66, 18, 52
_TEXT = 'font-family="sans-serif" font-size="11" fill="#333"'


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: what it shows.
        x_label, y_label: the axes' names, with units.
        series: name -> points (x, y). With `bars`, x is the name of a category.
        log_x, log_y: logarithmic axes; all their values are above 0.
        bars: bars in groups by category, in place of lines.
        dashed: names of series that are drawn as dashed lines without points (fits, floors).
        dots: names of series that are drawn as points without a line.
        zoom: the y axis need not begin at zero.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple]]
    log_x: bool = False
    log_y: bool = False
    bars: bool = False
    dashed: frozenset[str] = frozenset()
    dots: frozenset[str] = frozenset()
    zoom: bool = False


def svg(panels: Sequence[Panel], title: str, columns: int = 2) -> str:
    """The panels as one picture."""
    if not panels or not all(panel.series and all(panel.series.values()) for panel in panels):
        raise ValueError("a plot needs at least one panel, and a point in every series")
    columns = min(columns, len(panels))
    width, height = WIDTH * columns, 30 + HEIGHT * -(-len(panels) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="20" font-family="sans-serif" font-size="14" font-weight="bold" fill="#222">'
        f"{escape(title)}</text>",
    ]
    for number, panel in enumerate(panels):
        x, y = WIDTH * (number % columns), 30 + HEIGHT * (number // columns)
        parts += [f'<g transform="translate({x},{y})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    legend, top = _legend(panel)
    down = HEIGHT - top - BOTTOM
    values = [y for points in panel.series.values() for _, y in points]
    y_axis = _Axis(
        values, panel.log_y, top + down, top, from_zero=not (panel.log_y or panel.zoom), pad=0.05 * panel.zoom
    )
    parts = [f'<text x="{LEFT}" y="16" {_TEXT} font-weight="bold">{escape(panel.title)}</text>', *legend]
    for value in y_axis.ticks:
        y = y_axis(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" {_TEXT} text-anchor="end">{number(value)}</text>')
    parts += _bars(panel, y_axis, top + down) if panel.bars else _lines(panel, y_axis, top + down)
    base = top + down
    parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#666"/>')
    across = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{across}" y="{HEIGHT - 12}" {_TEXT} text-anchor="middle">{escape(panel.x_label)}</text>')
    middle = top + down / 2
    parts.append(
        f'<text x="14" y="{middle:.0f}" {_TEXT} text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{escape(panel.y_label)}</text>"
    )
    return parts


def _legend(panel: Panel) -> tuple[list[str], int]:
    """The names of the series under the title, and where the axes may begin."""
    if len(panel.series) < 2:
        return [], 34
    parts, x, y = [], LEFT, 33
    for index, name in enumerate(panel.series):
        room = 30 + 6.6 * len(name)
        if x > LEFT and x + room > WIDTH - RIGHT:
            x, y = LEFT, y + 15
        dash = ' stroke-dasharray="4 3"' if name in panel.dashed else ""
        parts.append(
            f'<line x1="{x:.1f}" y1="{y - 4}" x2="{x + 16:.1f}" y2="{y - 4}" stroke="{_colour(index)}" '
            f'stroke-width="3"{dash}/>'
        )
        parts.append(f'<text x="{x + 20:.1f}" y="{y}" {_TEXT}>{escape(name)}</text>')
        x += room
    return parts, y + 14


def _lines(panel: Panel, y_axis: _Axis, base: float) -> list[str]:
    across = [x for points in panel.series.values() for x, _ in points]
    x_axis = _Axis(across, panel.log_x, LEFT, WIDTH - RIGHT, from_zero=False, pad=0.05 * bool(panel.dots))
    own = sorted(set(across))
    ticks = own if panel.log_x and len(own) <= 10 else x_axis.ticks
    parts = []
    for value in ticks:
        x = x_axis(value)
        parts.append(f'<line x1="{x:.1f}" y1="{base}" x2="{x:.1f}" y2="{base + 4}" stroke="#666"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" {_TEXT} text-anchor="middle">{number(value)}</text>')
    for index, (name, points) in enumerate(panel.series.items()):
        if name not in panel.dots:
            line = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in points)
            dash = ' stroke-dasharray="4 3"' if name in panel.dashed else ""
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{_colour(index)}" stroke-width="1.8"{dash}>'
                f"<title>{escape(name)}</title></polyline>"
            )
        if (len(points) <= 24 or name in panel.dots) and name not in panel.dashed:
            parts += [
                f'<circle cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="2.8" fill="{_colour(index)}"/>'
                for x, y in points
            ]
    return parts


def _bars(panel: Panel, y_axis: _Axis, base: float) -> list[str]:
    categories = list(dict.fromkeys(x for points in panel.series.values() for x, _ in points))
    slot = (WIDTH - RIGHT - LEFT) / len(categories)
    width = min(46.0, 0.84 * slot / len(panel.series))
    crowded = 6.4 * max(len(str(category)) for category in categories) > slot
    parts = []
    for place, category in enumerate(categories):
        centre = LEFT + slot * (place + 0.5)
        y = base + 14 + 11 * (place % 2 if crowded else 0)
        parts.append(f'<text x="{centre:.1f}" y="{y}" {_TEXT} text-anchor="middle">{escape(str(category))}</text>')
    for index, (name, points) in enumerate(panel.series.items()):
        for category, value in points:
            x = LEFT + slot * (categories.index(category) + 0.5) + width * (index - len(panel.series) / 2)
            y = y_axis(value)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{max(0.0, base - y):.1f}" '
                f'fill="{_colour(index)}"><title>{escape(name)}</title></rect>'
            )
            middle = x + width / 2
            upright = width >= 6 * len(number(value))
            turned = f'text-anchor="middle" x="{middle:.1f}" y="{y - 3:.1f}"'
            if not upright:  # the figure would run into its neighbours
                turned = f'transform="translate({middle + 3:.1f},{y - 3:.1f}) rotate(-90)"'
            parts.append(f'<text {turned} font-family="sans-serif" font-size="9" fill="#333">{number(value)}</text>')
    return parts


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


class _Axis:
    """Values to places, between `start` and `end` of the picture; `pad` is a share of them left free at both ends."""

    def __init__(
        self, values: Sequence[float], log: bool, start: float, end: float, from_zero: bool, pad: float = 0.0
    ) -> None:
        low, high = min(values), max(values)
        if log and low <= 0:
            raise ValueError(f"a logarithmic axis cannot show {low}")
        self._log, self._start, self._end = log, start, end
        if log:
            self.ticks = _log_ticks(low, high)
            low, high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        else:
            low = min(0.0, low) if from_zero else low
            self.ticks = _ticks(low, high)
            if from_zero:  # with room for what stands above the highest bar
                high = max(high * 1.12, self.ticks[-1])
            low, high = low - pad * (high - low), high + pad * (high - low)
        self._low, self._high = self._scale(low), self._scale(high)

    def _scale(self, value: float) -> float:
        return math.log(value) if self._log else value

    def __call__(self, value: float) -> float:
        span = self._high - self._low
        share = (self._scale(value) - self._low) / span if span else 0.5
        return self._start + (self._end - self._start) * share


def _ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high`."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [round(step * index, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around `low` and `high`; powers alone where there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 3 else (1, 2, 5)
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    below = max((value for value in every if value <= low * (1 + 1e-9)), default=every[0])
    above = min((value for value in every if value >= high * (1 - 1e-9)), default=every[-1])
    return [value for value in every if below <= value <= above]


def number(value: float) -> str:
    """Short, as an axis shows it."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
