"""Number formats of reports and JSON."""

import math


def compact(value: float) -> str:
    """1234 -> 1.2k, 2500000 -> 2.5M."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + letter
    return f"{value:.0f}"


def figure_text(value: float) -> str:
    """Four significant digits, but never an exponent for large numbers: 0.9634, 15795 instead of 1.58e+04."""
    return f"{value:.0f}" if abs(value) >= 9999.5 else f"{value:.4g}"


def seconds_text(value: float) -> str:
    """``350 ms``, ``4.1 s``; ``never`` for infinity; a dash for NaN."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    return f"{1000 * value:.0f} ms" if abs(value) < 1 else f"{value:.1f} s"


def percent_text(value: float | None) -> str:
    """A share as ``8.4 %`` or ``52 %``; a dash for None."""
    if value is None:
        return "–"
    percent = 100 * value
    return f"{percent:.1f} %" if 0 < percent < 10 else f"{percent:.0f} %"


def times_text(value: float | None) -> str:
    """A factor as ``7.2×``; a dash for None."""
    if value is None:
        return "–"
    if value > 1000:
        return "over 1000×"
    return f"{value:.0f}×" if value >= 20 else f"{value:.1f}×"
