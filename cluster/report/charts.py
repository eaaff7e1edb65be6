"""The report's charts as inline SVG. Colours are CSS variables, so that they follow the page's light or dark theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from cluster.report.model import LiveWindow
from cluster.types import Question

WIDTH, HEIGHT = 520, 216
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 12, 30


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map from data to pixels."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return round(self.first + (value - self.low) / span * (self.last - self.first), 1)


def answers_over_time(windows: Sequence[LiveWindow], questions: Sequence[Question]) -> Markup:
    """Score of every question at the end of every window; gated windows are shaded, their points hollow."""
    ends = [window.end_s for window in windows]
    x = Scale(min(window.start_s for window in windows), max(ends), LEFT, WIDTH - RIGHT)
    y = Scale(0, 1, HEIGHT - BOTTOM, TOP)
    parts = _axis_y([(0, "0"), (0.5, "0.5"), (1, "1")], y)
    previous = windows[0].start_s
    for window in windows:
        if window.gated:
            width = round(x(window.end_s) - x(previous), 1)
            parts.append(
                f'<rect class="gated" x="{x(previous)}" y="{TOP}" width="{width}" height="{HEIGHT - TOP - BOTTOM}">'
                "<title>Nothing moved: the last answer stood, nothing was computed</title></rect>"
            )
        previous = window.end_s
    for index, question in enumerate(questions):
        series = f"series-{index % 4}"
        level = y(question.threshold)
        parts.append(f'<line class="threshold {series}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level}" y2="{level}"/>')
        points = [(window, window.scores[question.id]) for window in windows if question.id in window.scores]
        line = " ".join(f"{x(window.end_s)},{y(score)}" for window, score in points)
        parts.append(f'<polyline class="line {series}" points="{line}"/>')
        for window, score in points:
            text = f"{question.id} at {window.end_s:.0f} s: {score:.2f}" + (" (gated)" if window.gated else "")
            shape = _marker(
                index, x(window.end_s), y(score), f"point {series}{' hollow' if window.gated else ''}", text
            )
            parts.append(shape)
    parts += _axis_x(_ticks(x.low, x.high), x, "seconds since the camera's first frame")
    return _svg(parts, f"Scores of {len(questions)} questions over {len(windows)} windows")


def tokens_per_window(windows: Sequence[LiveWindow]) -> Markup:
    """Three nested bars per window: tokens with nothing pruned, kept by the pruner, computed by the language model."""
    most = max(window.full for window in windows) or 1
    y = Scale(0, most, HEIGHT - BOTTOM, TOP)
    parts = _axis_y([(tick, compact(tick)) for tick in _ticks(0, most, 4)], y)
    step = (WIDTH - LEFT - RIGHT) / len(windows)
    every = max(1, -(-len(windows) // 8))
    for index, window in enumerate(windows):
        middle = LEFT + step * (index + 0.5)
        text = (
            f"window ending at {window.end_s:.0f} s: {window.full} tokens in full, {window.kept} kept, "
            f"{window.computed} computed{' (gated)' if window.gated else ''}"
        )
        bars = "".join(
            _bar(middle, min(width, step * share), y(0), y(value), name)
            for name, value, width, share in (
                ("full", window.full, 40, 0.8),
                ("kept", window.kept, 30, 0.6),
                ("computed", window.computed, 20, 0.4),
            )
        )
        parts.append(f"<g>{bars}<title>{escape(text)}</title></g>")
        if index % every == 0:
            parts.append(_label(middle, HEIGHT - BOTTOM + 14, f"{window.end_s:.0f} s"))
    parts.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 2, "end of window"))
    return _svg(parts, f"Tokens of {len(windows)} windows: full, kept, computed")


def compact(value: float) -> str:
    """1234 -> 1.2k, 2500000 -> 2.5M."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + letter
    return f"{value:.0f}"


def _bar(middle: float, width: float, bottom: float, top: float, name: str) -> str:
    height = round(bottom - top, 1)
    left = round(middle - width / 2, 1)
    return f'<rect class="bar {name}" x="{left}" y="{top}" width="{round(width, 1)}" height="{height}" rx="2"/>'


def _marker(index: int, x: float, y: float, classes: str, text: str) -> str:
    title = f"<title>{escape(text)}</title>"
    if index % 2:
        return f'<rect class="{classes}" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7">{title}</rect>'
    return f'<circle class="{classes}" cx="{x}" cy="{y}" r="4">{title}</circle>'


def _axis_y(ticks: Sequence[tuple[float, str]], y: Scale) -> list[str]:
    parts = []
    for value, text in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(_label(LEFT - 6, y(value) + 4, text, "end"))
    return parts


def _axis_x(ticks: Sequence[float], x: Scale, title: str) -> list[str]:
    labels = [_label(x(tick), HEIGHT - BOTTOM + 14, f"{tick:.0f}") for tick in ticks]
    return [*labels, _label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 2, title)]


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round values from ``low`` to ``high``, about ``count`` of them."""
    span = (high - low) or 1.0
    rough = span / count
    power = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 1.0
    step = next((power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough), power * 10)
    first = -(-low // step) * step
    ticks = [first + step * index for index in range(int((high - first) / step + 1e-9) + 1)]
    return ticks or [low]


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], title: str) -> Markup:
    body = "".join(parts)
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>')
