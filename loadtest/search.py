"""The search for the most streams that a cluster keeps up with. Decides what to try next; measures nothing itself.

Doubling until the cluster does not keep up, then halving the gap until it is small; a count is stable when it was twice
in a row. Then from a fresh start at the last stable count, with starts evenly spaced, one stream more at a time.
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
"""Times in a row that a count must be stable."""

GAP = 0.05
"""Share of the count below which doubling and halving end, and adding one at a time begins."""

Phase = Literal["coarse", "fine"]


@dataclass(frozen=True, slots=True)
class Try:
    """One measurement: how many streams, and whether they were stable. ``limit``: who could not keep up; ``note``: why,
    one sentence; ``fresh``: the first after a start of its own."""

    streams: int
    stable: bool
    phase: Phase
    fresh: bool = False
    limit: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure next; ``fresh``: from a start of its own, phases evenly spaced."""

    streams: int
    phase: Phase
    fresh: bool


@dataclass(slots=True)
class Search:
    """``tries`` is all of its state, so that it can be written down and gone on with.

    ``first``: streams to begin with; ``most``: beyond which nobody looks; ``settings``: what the tries are made with; a
    search with others cannot go on.
    """

    first: int = 8
    most: int = 4096
    settings: Mapping[str, Any] = field(default_factory=dict)
    tries: list[Try] = field(default_factory=list)

    def next(self) -> Wanted | None:
        """What to measure next; None when it is over."""
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

    def record(self, result: Try) -> None:
        self.tries.append(result)

    @property
    def stable(self) -> int:
        """Most streams that were stable twice in a row: from the fresh start where there was one, else 0 or what
        doubling and halving found."""
        fine, _ = self._bounds("fine")
        coarse, _ = self._bounds("coarse")
        return fine if any(each.phase == "fine" for each in self.tries) else coarse

    @property
    def limit(self) -> str | None:
        """Who could not keep up with the fewest streams that were too many; None while none were."""
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
        # Not even where it was stable before: begin lower.
        streams = last.streams - max(1, math.ceil(GAP * last.streams))
        return Wanted(streams, "fine", fresh=True) if streams > 0 else None

    def _bounds(self, phase: Phase) -> tuple[int, float]:
        """Most streams that were stable below all that were not, and the fewest that were not."""
        mine = [each for each in self.tries if each.phase == phase]
        high = min((each.streams for each in mine if not each.stable), default=math.inf)
        return max((n for n in {t.streams for t in mine} if n < high and self._is_stable(n, phase)), default=0), high

    def _is_stable(self, streams: int, phase: Phase) -> bool:
        mine = [each.stable for each in self.tries if (each.streams, each.phase) == (streams, phase)]
        return len(mine) >= TWICE and all(mine[-TWICE:])

    # -- writing it down ------------------------------------------------------------------------
    def save(self, path: Path) -> None:
        """Write the state where :meth:`load` reads it; a search that is interrupted leaves the last whole state. Raises
        ``SightlineError``: the file cannot be written."""
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    def load(self, path: Path) -> int:
        """Go on from what :meth:`save` wrote, if there is such a file; returns how many tries it holds. Raises
        ``ConfigError``: it is no such file, or of a search with other settings."""
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
