"""Stretches of time as people write and read them: ``10m`` in, ``12 min 03 s`` out."""

from __future__ import annotations

import re

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)
LONGEST_S = 3_650 * 86_400.0


def parse_duration(text: str, option: str) -> float:
    """Seconds of ``90s``, ``10m``, ``2h``, ``1d`` or several together, as in ``1h30m``; ``option``: who asks.

    Raises:
        ConfigError: anything else, nothing at all, or more than ten years.
    """
    from cluster.errors import ConfigError

    written = text.strip().lower()
    parts = _PART.findall(written)
    units = [unit for _, unit in parts]
    if not parts or "".join(number + unit for number, unit in parts) != written or len(set(units)) < len(units):
        raise ConfigError(f"{option} {text!r} is no duration; write it as in 90s, 10m, 2h, 1d or 1h30m")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not 0 < seconds <= LONGEST_S:
        raise ConfigError(f"{option} {text!r} must be longer than nothing and at most ten years")
    return seconds


def spoken(seconds: float) -> str:
    """``8 s``, ``0.5 s``, ``12 min 03 s``, ``2 h 05 min``, ``3 d 04 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3_600)
    return f"{hours // 24} d {hours % 24:02d} h"


def spoken_bytes(size: int) -> str:
    """``512 B``, ``34.2 MiB``."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"
