"""What sections share: closed and immutable models; sizes and times as people write them: ``64MiB``, ``24h``."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema


class Section(BaseModel):
    """One concern of the configuration. Unknown keys are refused; a loaded section does not change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=False,
        protected_namespaces=(),
    )


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[kKMGT]B|[KMGT]iB)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?")

_BYTES = {None: 1, "B": 1, "kB": 10**3, "KB": 10**3}
_BYTES |= {f"{letter}B": 1000**power for power, letter in enumerate("MGT", start=2)}
_BYTES |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_SECONDS = {None: 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def parse_size(value: object) -> int:
    """Bytes of a number, or of text like ``64MiB`` (2^20), ``64MB`` (10^6) and ``512 KiB``.

    Raises:
        ValueError: no size.
    """
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match:
        return round(float(match[1]) * _BYTES[match[2]])
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError(f"must be a number of bytes, or a size like 512KiB, 64MiB or 2GB, not {value!r}")
    return int(value)


def parse_duration(value: object) -> float:
    """Seconds of a number, or of text like ``90s``, ``10m`` (or ``10min``), ``24h`` and ``7d``.

    Raises:
        ValueError: no length of time.
    """
    match = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
    if match:
        return float(match[1]) * _SECONDS[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number of seconds, or a length of time like 90s, 10m, 24h or 7d, not {value!r}")
    return float(value)


def size_text(nbytes: int) -> str:
    """``64MiB``; the largest unit that is exact, else bytes. Reads back as the same number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _BYTES[unit] == 0:
            return f"{nbytes // _BYTES[unit]}{unit}"
    return str(nbytes)


Size: TypeAlias = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": f"^{_SIZE.pattern}$"}]}),
]
"""Bytes of a section; the bounds that ``Field`` adds hold for the number."""

Duration: TypeAlias = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^{_TIME.pattern}$"}]}),
]
"""Seconds of a section; the bounds that ``Field`` adds hold for the number."""
