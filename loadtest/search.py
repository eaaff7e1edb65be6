"""Search for the maximum number of streams that a cluster keeps up with. Chooses what to try; measures nothing itself.

Coarse: double until the cluster does not keep up, then bisect until the gap is small. Fine: from a fresh start at the
last stable count, with evenly spaced phases, add one stream at a time. A count is stable if it was twice in a row.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cluster.errors import ConfigError
from cluster.files import write_text

TWICE = 2
"""Consecutive stable tries that make a count stable."""

GAP = 0.05
"""Relative gap below which the coarse phase ends and the fine phase starts."""

Phase = Literal["coarse", "fine"]


@dataclass(frozen=True, slots=True)
class Try:
    """One measurement: number of streams, and whether it was stable. ``limit``: what could not keep up; ``note``: why,
    in one sentence; ``fresh``: whether it is the first after a fresh start; ``silent``, ``reduced_share``: of its
    ``Measurement``."""

    streams: int
    stable: bool
    phase: Phase
    fresh: bool = False
    limit: str | None = None
    note: str = ""
    silent: int = 0
    reduced_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure next; ``fresh``: from a fresh start, with evenly spaced phases."""

    streams: int
    phase: Phase
    fresh: bool


@dataclass(slots=True)
class Search:
    """State machine of the search. ``tries`` is its entire state, so that it can be saved and resumed.

    ``first``: initial number of streams; ``most``: upper bound of the search; ``settings``: conditions of the tries; a
    search with other settings cannot be resumed.
    """

    first: int = 8
    most: int = 4096
    settings: Mapping[str, Any] = field(default_factory=dict)
    tries: list[Try] = field(default_factory=list)

    def next(self) -> Wanted | None:
        """What to measure next; None when the search is finished."""
        last = self.tries[-1] if self.tries else None
        if last is not None and last.limit == "generator":
            return None
        if last is not None and last.stable and not self._is_stable(last.streams, last.phase):
            return Wanted(last.streams, last.phase, fresh=False)
        if last is None or last.phase == "coarse":
            streams = self._coarse()
            if streams is not None:
                return Wanted(streams, "coarse", fresh=False)
            low, _ = self._bounds("coarse")
            return Wanted(low, "fine", fresh=True) if low else None
        return self._fine(last)

    @property
    def stable(self) -> int:
        """Maximum stable number of streams: of the fine phase if it has begun, else of the coarse phase; 0 for none."""
        fine, _ = self._bounds("fine")
        coarse, _ = self._bounds("coarse")
        return fine if any(each.phase == "fine" for each in self.tries) else coarse

    @property
    def limit(self) -> str | None:
        """What could not keep up at the smallest unstable number of streams; None if all were stable."""
        unstable = [each for each in self.tries if not each.stable]
        return min(unstable, key=lambda each: each.streams).limit if unstable else None

    def _coarse(self) -> int | None:
        low, high = self._bounds("coarse")
        if math.isinf(high):
            return None if low >= self.most else min(self.most, max(self.first, 2 * low))
        if high - low <= max(1, GAP * high):
            return None
        return (low + int(high)) // 2

    def _fine(self, last: Try) -> Wanted | None:
        low, high = self._bounds("fine")
        if low:
            return Wanted(low + 1, "fine", fresh=False) if low + 1 < min(high, self.most + 1) else None
        # Unstable even at the coarse result: start lower.
        streams = last.streams - max(1, math.ceil(GAP * last.streams))
        return Wanted(streams, "fine", fresh=True) if streams > 0 else None

    def _bounds(self, phase: Phase) -> tuple[int, float]:
        """Maximum stable count below every unstable one, and minimum unstable count."""
        mine = [each for each in self.tries if each.phase == phase]
        high = min((each.streams for each in mine if not each.stable), default=math.inf)
        return max((n for n in {t.streams for t in mine} if n < high and self._is_stable(n, phase)), default=0), high

    def _is_stable(self, streams: int, phase: Phase) -> bool:
        mine = [each.stable for each in self.tries if (each.streams, each.phase) == (streams, phase)]
        return len(mine) >= TWICE and all(mine[-TWICE:])

    # -- persistence ----------------------------------------------------------------------------
    def save(self, path: Path) -> None:
        """Write the state for :meth:`load`, atomically. Raises ``SightlineError``: the file cannot be written."""
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    def load(self, path: Path) -> int:
        """Resume from what :meth:`save` wrote, if the file exists; returns the number of tries in it. Raises
        ``ConfigError``: not such a file, or of a search with other settings."""
        if not path.exists():
            return 0
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            tries = [Try(**each) for each in body["tries"]]
            settings = body["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is not the state of a search; remove it or name another --state") from None
        if settings != json.loads(json.dumps(dict(self.settings))):
            changed = sorted(key for key in {*settings, *self.settings} if settings.get(key) != self.settings.get(key))
            raise ConfigError(
                f"{path} is of a search with other settings ({', '.join(changed)}); remove it or name another --state"
            )
        self.tries = tries
        return len(tries)
