"""The evaluation's charts as SVG files of their own; inside the page they follow its light or dark theme likewise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cluster.lab.report.charts import Scale

WIDTH, HEIGHT = 620, 340
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 34, 62
LINE_HEIGHT = 16

# Tableau's colours that stay apart for the colour-blind, on white and on black.
COLOURS = ("#1170aa", "#fc7d0b", "#57606c", "#5fa2ce", "#c85200", "#7b848f", "#a3acb9", "#a3cce9")

STYLE = (
    "svg{font:12px system-ui,sans-serif}text{fill:#24292f}.grid{stroke:#d0d7de;stroke-width:1}"
    ".title{font-weight:600;font-size:13px}.span{fill:#c85200;fill-opacity:.13}"
    "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}.grid{stroke:#3d444d}}"
)


@dataclass(frozen=True, slots=True)
class Point:
    """``low, high``: its confidence interval, ``nan`` without one; ``text``: what it says when pointed at."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    text: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name; ``joined`` by a line in the order of x, ``marked`` by a shape each. ``colour``: a place in
    ``COLOURS``, ``None`` for the next."""

    name: str
    points: tuple[Point, ...]
    joined: bool = True
    marked: bool = True
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the x axis that is shaded behind the lines, such as a fault's; an infinite end is the chart's.
    ``name`` is written at its top, and ``text`` is shown when pointed at."""

    low: float
    high: float
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """``log``: base ten. ``percent``: labels are shares."""

    title: str
    log: bool = False
    percent: bool = False
    low: float | None = None
    high: float | None = None

    def ticks(self, values: Sequence[float]) -> tuple[Scale, list[tuple[float, str]]]:
        """A scale without pixels (0 to 1) over the values, and labelled ticks in data units."""
        known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low = min(known) if self.low is None else self.low
        high = max(known) if self.high is None else self.high
        if high <= low:
            low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
        if self.log:
            places = _log_ticks(low, high)
            low, high = min(low, places[0]), max(high, places[-1])
            return Scale(math.log10(low), math.log10(high), 0, 1), [(place, self._label(place)) for place in places]
        places = _ticks(low, high)
        return Scale(low, high, 0, 1), [(place, self._label(place)) for place in places]

    def place(self, value: float) -> float:
        """Onto the scale's units."""
        return math.log10(value) if self.log else value

    def _label(self, value: float) -> str:
        return f"{100 * value:.3g} %" if self.percent else f"{value:.4g}"


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis, spans: Sequence[Span] = ()) -> str:
    """An SVG document with these series. Points that are not numbers are left out (and with them empty series)."""
    shown = [(each, [p for p in each.points if math.isfinite(p.x) and math.isfinite(p.y)]) for each in series]
    shown = [(each, points) for each, points in shown if points]
    columns = 3 if all(len(each.name) <= 26 for each, _ in shown) else 2
    rows = -(-len(shown) // columns)
    height = HEIGHT + LINE_HEIGHT * max(0, rows - 1)
    bottom = HEIGHT - BOTTOM
    ends = [value for _, points in shown for p in points for value in (p.y, p.low, p.high)]
    x_unit, x_ticks = x.ticks([p.x for _, points in shown for p in points])
    y_unit, y_ticks = y.ticks(ends)
    across = Scale(x_unit.low, x_unit.high, LEFT, WIDTH - RIGHT)
    up = Scale(y_unit.low, y_unit.high, bottom, TOP)
    parts = [f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>']
    parts += [_shaded(span, across, x, x_unit) for span in spans]
    for value, text in y_ticks:
        level = up(y.place(value))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level}" y2="{level}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{level + 4}" text-anchor="end">{escape(text)}</text>')
    for value, text in x_ticks:
        parts.append(f'<text x="{across(x.place(value))}" y="{bottom + 16}" text-anchor="middle">{escape(text)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 33}" text-anchor="middle">{escape(x.title)}</text>')
    parts.append(
        f'<text transform="translate(13 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.title)}</text>"
    )
    for number, (each, points) in enumerate(shown):
        colour = COLOURS[(number if each.colour is None else each.colour) % len(COLOURS)]
        placed = [(across(x.place(p.x)), up(y.place(p.y)), p) for p in points]
        if each.joined:
            placed.sort(key=lambda entry: entry[0])
        if each.joined and len(placed) > 1:
            line = " ".join(f"{a},{b}" for a, b, _ in placed)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for a, b, point in placed if each.marked else ():
            parts.append(_marker(number, a, b, point, colour, up, y))
        row, column = divmod(number, columns)
        left, level = LEFT + column * (WIDTH - LEFT) // columns, bottom + 52 + row * LINE_HEIGHT
        parts.append(f'<circle cx="{left}" cy="{level - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 9}" y="{level}">{escape(each.name)}</text>')
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>{body}</svg>'
    )


def _shaded(span: Span, across: Scale, x: Axis, unit: Scale) -> str:
    """Within the chart; nothing where it lies outside."""
    low, high = x.place(span.low), x.place(span.high)
    if high < unit.low or low > unit.high:
        return ""
    left = across(max(low, unit.low))
    width = max(1.5, across(min(high, unit.high)) - left)
    return (
        f'<g><rect class="span" x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - BOTTOM - TOP}"/>'
        f'<text x="{left + 3:.1f}" y="{TOP + 12}">{escape(span.name)}</text>'
        f"<title>{escape(span.text)}</title></g>"
    )


def _marker(number: int, a: float, b: float, point: Point, colour: str, up: Scale, y: Axis) -> str:
    bar = ""
    if math.isfinite(point.low) and math.isfinite(point.high):
        ends = f'y1="{up(y.place(point.low))}" y2="{up(y.place(point.high))}"'
        bar = f'<line x1="{a}" x2="{a}" {ends} stroke="{colour}" stroke-opacity=".45"/>'
    title = f"<title>{escape(point.text)}</title>" if point.text else ""
    if number % 2:
        return f'{bar}<rect x="{a - 3.5:.1f}" y="{b - 3.5:.1f}" width="7" height="7" fill="{colour}">{title}</rect>'
    return f'{bar}<circle cx="{a}" cy="{b}" r="4" fill="{colour}">{title}</circle>'


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values within ``[low, high]``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(step * index, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten from the one at or below ``low`` to the one at or above ``high``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    places = [round(m * 10.0**power, 12) for power in powers for m in (1, 2, 5)]
    first = max((place for place in places if place <= low * (1 + 1e-9)), default=places[0])
    last = min((place for place in places if place >= high * (1 - 1e-9)), default=places[-1])
    return [place for place in places if first <= place <= last]
