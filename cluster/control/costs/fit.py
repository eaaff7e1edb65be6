"""A cost model from timed steps: non-negative least squares of the relative error."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from cluster.control.costs.model import CostModel, WindowWork
from cluster.errors import ConfigError

LEAST_STEPS = 8
"""Fewer timed steps than this say nothing of five coefficients."""

Timed = tuple[Sequence[WindowWork], float]


def fit(steps: Sequence[Timed], *, model: str, device: str, source: str) -> CostModel:
    """The cost model under which ``steps`` (windows stepped together, seconds) are likeliest.

    Every coefficient is at least 0: a negative one would make some window free. Errors count relative to the step's
    seconds, so that short steps weigh as much as long ones.

    Raises:
        ConfigError: too few steps, or one without windows or time.
    """
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"a cost model needs at least {LEAST_STEPS} timed steps, not {len(steps)}")
    if any(not works or not seconds > 0 for works, seconds in steps):
        raise ConfigError("a timed step has at least one window and took some time")
    rows = np.array(
        [
            [
                1,
                len(works),
                *(sum(getattr(work, name) for work in works) for name in ("encoded", "computed", "attended")),
            ]
            for works, _ in steps
        ],
        dtype=np.float64,
    )
    seconds = np.array([seconds for _, seconds in steps])
    found = _non_negative(rows / seconds[:, None], np.ones(len(steps)))
    ratio = seconds / np.maximum(rows @ found, 1e-12)
    error = statistics.median(np.abs(1 / ratio - 1).tolist())
    # Of the middle two thirds: one step that something else held up says nothing of how steps scatter.
    low, high = np.quantile(np.log(ratio), [0.16, 0.84])
    names = ("step_s", "window_s", "encoded_s", "computed_s", "attended_s")
    coefficients = {name: float(value) for name, value in zip(names, found, strict=True)}
    return CostModel(model, device, source, **coefficients, spread=float(high - low) / 2, error=error)


def _non_negative(rows: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``x >= 0`` that minimises ``|rows x - wanted|``; exact. With five columns trying every set of non-zero ones (the
    minimum is the free minimum of one of them) is simpler than an active-set method."""
    columns = rows.shape[1]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(columns), float(wanted @ wanted)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            part = list(chosen)
            free = np.linalg.lstsq(rows[:, part] / scale[part], wanted, rcond=None)[0]
            if (free < 0).any():
                continue
            rest = rows[:, part] @ (free / scale[part]) - wanted
            if rest @ rest < least - 1e-12:
                least = float(rest @ rest)
                best = np.zeros(columns)
                best[part] = free / scale[part]
    return best
