"""What a part of the memory bench hands back, and the goals its figures are held to."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

GOALS: dict[str, tuple[str, float]] = {
    "cap_violations": ("<=", 0.0),
    "memory_growth": ("<=", 0.01),
    "compress_share_infinipot_v": ("<=", 0.01),
    "compress_share_cords": ("<=", 0.02),
    "coverage_cords_over_infinipot_v": (">=", 1.0),
    "coverage_infinipot_v_over_uniform": (">=", 1.0),
    "ttft_vs_token_retrieval": (">=", 2.0),
    "transfers_vs_token_retrieval": (">=", 5.0),
    "ttft_64k_over_4k": ("<=", 2.0),
    "prefetch_hidden_1ms": (">=", 0.8),
    "prefetch_hidden_5ms": (">=", 0.8),
    "prefetch_hidden_20ms": (">=", 0.8),
    "deferred_split_saving": (">=", 0.4),
    "restore_speedup": (">=", 10.0),
}
"""Figure -> the side of which number it should be on; figures that are not here have no goal."""

_MEETS = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Part:
    """``figures`` name -> ratio or count of this run; ``rows``, all of the same keys, the table behind them."""

    figures: dict[str, float]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


def against_goals(part: str, figures: dict[str, float]) -> list[dict[str, Any]]:
    """One row per figure: what was measured, and whether that meets its goal."""
    rows = []
    for name, measured in figures.items():
        side, goal = GOALS.get(name, ("", 0.0))
        rows.append(
            {
                "part": part,
                "figure": name,
                "measured": measured,
                "goal": f"{side} {goal:g}" if side else None,
                "met": ("yes" if _MEETS[side](measured, goal) else "no") if side else None,
            }
        )
    return rows
