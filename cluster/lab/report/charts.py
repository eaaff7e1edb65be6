"""The report's charts as inline SVG. Colours are CSS variables, so that they follow the page's light or dark theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from cluster.lab.report.model import LiveWindow

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


def tokens_per_window(windows: Sequence[LiveWindow]) -> Markup:
    """Three nested bars per window: tokens with nothing pruned, kept by the pruner, computed by the language model."""
    most = max(window.full for window in windows) or 1
    y = Scale(0, most, HEIGHT - BOTTOM, TOP)
    parts = _axis_y([(tick, compact(tick)) for tick in ticks(0, most, 4)], y)
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
            parts.append(label(middle, HEIGHT - BOTTOM + 14, f"{window.end_s:.0f} s"))
    parts.append(label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 2, "end of window"))
    return svg(parts, f"Tokens of {len(windows)} windows: full, kept, computed")


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


def _axis_y(ticks: Sequence[tuple[float, str]], y: Scale) -> list[str]:
    parts = []
    for value, text in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(label(LEFT - 6, y(value) + 4, text, "end"))
    return parts


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round values from ``low`` to ``high``, about ``count`` of them."""
    span = (high - low) or 1.0
    rough = span / count
    power = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 1.0
    step = next((power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough), power * 10)
    first = -(-low // step) * step
    ticks = [first + step * index for index in range(int((high - first) / step + 1e-9) + 1)]
    return ticks or [low]


def label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """A small text beside the data."""
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def svg(parts: Sequence[str], title: str, height: int = HEIGHT) -> Markup:
    """The whole drawing, ``WIDTH`` wide; ``title`` is what a screen reader says."""
    body = "".join(parts)
    return Markup(f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{body}</svg>')
