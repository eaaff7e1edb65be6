"""Cost model: duration of an engine step, linear in the work of its windows."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.errors import ConfigError
from cluster.files import write_text
from cluster.types import TokenCount

SHIPPED = Path(__file__).parent


def names() -> list[str]:
    """Names of the cost models shipped with Sightline."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load(name_or_path: str | Path) -> CostModel:
    """Load a shipped cost model by name, or any by path. Raises ``ConfigError``: the file is missing or not a cost
    model."""
    path = Path(name_or_path)
    if str(name_or_path) in names():
        path = SHIPPED / f"{name_or_path}.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(
            f"there is no cost model {str(name_or_path)!r}; give a file written by sightline bench cost --out, or one "
            f"of: {', '.join(names())}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); regenerate it with: sightline bench cost --out") from None
    wanted = {field.name for field in fields(CostModel)}
    if not isinstance(body, dict) or set(body) != wanted:
        raise ConfigError(
            f"{path} is not a cost model, which has exactly the keys {', '.join(sorted(wanted))}; "
            "write one with: sightline bench cost --out"
        )
    return CostModel(**body)


def save(costs: CostModel, path: Path) -> None:
    """Write a cost model file for :func:`load`. Raises ``SightlineError``: the file cannot be written."""
    write_text(path, json.dumps(asdict(costs), indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class WindowWork:
    """Work of one window; floats, since it may be an expected value.

    * ``encoded``: visual tokens through the tower
    * ``computed``: tokens through the language model: refreshed, new and the questions'
    * ``attended``: pairs of a computed token and a slot it attends to, in one layer
    """

    encoded: float
    computed: float
    attended: float

    @classmethod
    def from_layout(cls, *, kept: float, new: float, refreshed: float, query: float, encoded: float) -> WindowWork:
        """Work of a window of ``kept`` visual tokens. New tokens attend to the rest and on average to half of the new
        ones; refreshed ones, spread over the rest, to half of it; question tokens to everything."""
        rest = max(0.0, kept - new)
        attended = new * (rest + new / 2) + refreshed * rest / 2 + query * kept
        return cls(encoded, refreshed + new + query, attended)

    def mixed(self, other: WindowWork, share: float) -> WindowWork:
        """Expected work of a window that is like ``other`` with probability ``share``, else like this one."""
        return WindowWork(
            self.encoded + share * (other.encoded - self.encoded),
            self.computed + share * (other.computed - self.computed),
            self.attended + share * (other.attended - self.attended),
        )

    @classmethod
    def from_counts(cls, tokens: TokenCount) -> WindowWork:
        """Work of an answered window, from its token counts."""
        return cls.from_layout(
            kept=tokens.kept, new=tokens.new, refreshed=tokens.refreshed, query=tokens.query, encoded=tokens.encoded
        )


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: ``step_s + sum over windows (window_s + encoded·encoded_s + computed·computed_s +
    attended·attended_s)``.

    * ``model``, ``device``: what was measured; ``source``: one sentence on the origin of the numbers
    * ``spread``: standard deviation of log(measured / predicted)
    * ``error``: median relative error of the fit
    * ``window_tokens``: tokens of windows that a replica on this device holds, for planners; ``None``: not known
    """

    model: str
    device: str
    source: str
    step_s: float
    window_s: float
    encoded_s: float
    computed_s: float
    attended_s: float
    spread: float
    error: float
    window_tokens: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            known = value is not None or field.name != "window_tokens"
            if known and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"a cost model's {field.name} must be a number of at least 0, not {value!r}")
        if not self.window_s + self.encoded_s + self.computed_s + self.attended_s > 0:
            raise ConfigError("a cost model must have a positive cost per window, or nothing can be placed or admitted")

    def window_seconds(self, work: WindowWork) -> float:
        """Seconds that one more window adds to a step."""
        return (
            self.window_s
            + work.encoded * self.encoded_s
            + work.computed * self.computed_s
            + work.attended * self.attended_s
        )

    def seconds(self, works: Sequence[WindowWork]) -> float:
        """Seconds of a step of these windows; 0 for none."""
        return self.step_s + sum(map(self.window_seconds, works)) if works else 0.0

    def check(self, model: str) -> None:
        """Check that these are costs of ``model``. Raises ``ConfigError``: they belong to another model."""
        if model != self.model:
            raise ConfigError(
                f"these costs are of model {self.model!r} on {self.device}, not of {model!r}; "
                f"measure them with: sightline bench cost --model {model} --out costs.json"
            )


LEAST_STEPS = 8
"""Minimum timed steps for fitting five coefficients."""

Timed = tuple[Sequence[WindowWork], float]


def fit(steps: Sequence[Timed], *, model: str, device: str, source: str) -> CostModel:
    """Fit a cost model to ``steps`` (windows stepped together, seconds) by non-negative least squares.

    A negative coefficient could make a window free. Errors are relative to the step's duration, so that short steps
    weigh as much as long ones. Raises ``ConfigError``: too few steps, or one without windows or duration.
    """
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"a cost model needs at least {LEAST_STEPS} timed steps, not {len(steps)}")
    if any(not works or not seconds > 0 for works, seconds in steps):
        raise ConfigError("a timed step needs at least one window and a positive duration")
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
    # From the middle two thirds, since a step delayed by something else must not count as spread.
    low, high = np.quantile(np.log(ratio), [0.16, 0.84])
    names = ("step_s", "window_s", "encoded_s", "computed_s", "attended_s")
    coefficients = {name: float(value) for name, value in zip(names, found, strict=True)}
    return CostModel(model, device, source, **coefficients, spread=float(high - low) / 2, error=error)


def _non_negative(rows: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Exact ``x >= 0`` that minimises ``|rows x - wanted|``. With five columns, trying every set of non-zero ones (the
    minimum is the unconstrained minimum on one of them) is simpler than an active-set method."""
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
