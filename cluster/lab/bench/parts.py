"""A bench of several parts: what each hands back, the goals its figures are held to, and how they are run."""

from __future__ import annotations

import json
import operator
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.lab.bench.harness import BenchResult, table

Goals = Mapping[str, tuple[str, float]]
"""Figure -> the side of which number it should be on; figures that are not in it have no goal."""

_MEETS = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Part:
    """``figures`` name -> ratio or count of this run; ``rows``, all of the same keys, the table behind them."""

    figures: dict[str, float]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PartsResult(BenchResult):
    """``rows``: every figure against its goal; ``measured``: the rows behind them, each with its part's name. The JSON
    has the latter as ``rows``, the former as ``goals``."""

    measured: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """See :class:`BenchResult`."""
        body = {
            "bench": self.bench,
            "figures": self.figures,
            "goals": self.rows,
            "rows": self.measured,
            "notes": self.notes,
            "machine": self.machine,
        }
        return json.dumps(body, indent=2)


def run_parts(bench: str, parts: Mapping[str, Callable[[], Part]], goals: Goals) -> PartsResult:
    """Measure the parts one after the other; each prints its table as soon as it has it."""
    figures: dict[str, float] = {}
    against: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, measure in parts.items():
        began = time.perf_counter()
        part = measure()
        print(f"{name}\n{table(part.rows)}\n", flush=True)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        against += against_goals(goals, name, part.figures)
        measured += [{"part": name, **row} for row in part.rows]
        notes += [f"{name}: {note}" for note in part.notes]
        for figure, value in part.figures.items():
            # Two parts may count the same kind of violation.
            figures[figure] = figures.get(figure, 0.0) + value
    return PartsResult(bench, figures, against, notes, measured=measured)


def against_goals(goals: Goals, part: str, figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row per figure: what was measured, and whether that meets its goal."""
    rows = []
    for name, measured in figures.items():
        side, goal = goals.get(name, ("", 0.0))
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
