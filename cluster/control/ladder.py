"""The quality ladder: what each rung changes, saves and costs in F1, and the policy for stepping down and climbing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import NamedTuple

from cluster.errors import ConfigError
from cluster.files import write_text
from cluster.types.cameras import Priority

WEIGHTS: Mapping[Priority, float] = {Priority.CRITICAL: 16.0, Priority.NORMAL: 4.0, Priority.BACKGROUND: 1.0}


class _Candidate(NamedTuple):
    """A possible step; sorts with the best one first."""

    tier: int
    order: float
    camera: str
    rung: int


@dataclass(slots=True)
class CameraOnLadder:
    """A camera as the policy sees it.

    * ``rung``: its rung since ``since_s``
    * ``loads``: replica seconds per second, at each rung
    * ``best``: cache of its best step down (True) and up, with the inputs that led to it
    """

    priority: Priority
    loads: tuple[float, ...]
    rung: int = 0
    since_s: float = -math.inf
    best: dict[bool, tuple[tuple[object, ...], _Candidate | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def load(self) -> float:
        return self.loads[self.rung]


@dataclass(frozen=True, slots=True)
class Step:
    """One camera's change of rung; ``at_s``: the ``now_s`` of the decision."""

    camera: str
    rung_from: int
    rung_to: int
    reason: str
    at_s: float


@dataclass(frozen=True)
class LadderPolicy:
    """Steps down when a replica's utilisation is above ``high``, climbs when it is below ``low``, until ``aim``.

    Background and normal cameras step first, ordered by loss times weight divided by saving; background ones may be
    shed. Critical cameras step only if no other can, and are never shed. Shedding normal cameras is the last resort.

    Args:
        hold_s: seconds on a rung before a camera may climb, to prevent oscillation.
        climb: maximum utilisation added by one decision: cameras that climb together have windows due together.
        weights: weight of a camera's loss, by class.
    """

    ladder: Ladder
    high: float = 0.97
    aim: float = 0.95
    low: float = 0.92
    hold_s: float = 8.0
    climb: float = 0.05
    weights: Mapping[Priority, float] = field(default_factory=lambda: dict(WEIGHTS))

    def decide(
        self, cameras: Mapping[str, CameraOnLadder], utilisation: float, now_s: float, *, scale: float = 1.0
    ) -> list[Step]:
        """The steps that one replica's ``cameras``, which are not changed, should take now. ``utilisation``: its load /
        capacity; ``scale``: utilisation per unit of the cameras' loads."""
        reason = f"the replica is at {utilisation:.0%} of its capacity"
        reached: dict[str, int] = {}
        if utilisation > self.high:
            reached = self._down(cameras, utilisation, scale)
        elif utilisation < self.low:
            reached = self._up(cameras, utilisation, now_s, scale)
            reason += ": capacity is free again"
        return [Step(name, cameras[name].rung, rung, reason, now_s) for name, rung in reached.items()]

    def _down(self, cameras: Mapping[str, CameraOnLadder], utilisation: float, scale: float) -> dict[str, int]:
        heap = self._candidates(cameras.items(), down=True)
        reached: dict[str, int] = {}
        left = utilisation
        while heap and left > self.aim:
            turn = heappop(heap)
            camera = cameras[turn.camera]
            rung = reached.get(turn.camera, camera.rung)
            left -= (camera.loads[rung] - camera.loads[turn.rung]) * scale
            reached[turn.camera] = turn.rung
            below = self.lower(turn.camera, camera, turn.rung)
            if below is not None:
                heappush(heap, below)
        return reached

    def _up(
        self, cameras: Mapping[str, CameraOnLadder], utilisation: float, now_s: float, scale: float
    ) -> dict[str, int]:
        lowered = [
            (name, camera)
            for name, camera in cameras.items()
            if camera.rung > 0 and now_s - camera.since_s >= self.hold_s
        ]
        heap = self._candidates(lowered, down=False)
        reached: dict[str, int] = {}
        left, blocked = utilisation, math.inf
        until = utilisation + self.climb
        while heap and heap[0].tier <= blocked:
            turn = heappop(heap)
            camera = cameras[turn.camera]
            rung = reached.get(turn.camera, camera.rung)
            after = left + (camera.loads[turn.rung] - camera.loads[rung]) * scale
            if after > self.aim or (reached and after > until):
                # Less urgent cameras must not take the capacity that a more urgent one waits for.
                blocked = turn.tier
                continue
            left = after
            reached[turn.camera] = turn.rung
            above = self.upper(turn.camera, camera, turn.rung)
            if above is not None:
                heappush(heap, above)
        return reached

    def _candidates(self, cameras: Iterable[tuple[str, CameraOnLadder]], *, down: bool) -> list[_Candidate]:
        """The best step of each camera, as a heap; cached, since most cameras do not change between decisions."""
        best = self.lower if down else self.upper
        heap = []
        for name, camera in cameras:
            inputs = self, name, camera.priority, camera.loads, camera.rung
            found = camera.best.get(down)
            if found is None or found[0] != inputs:
                found = camera.best[down] = inputs, best(name, camera, camera.rung)
            if found[1] is not None:
                heap.append(found[1])
        heapify(heap)
        return heap

    def lower(self, name: str, camera: CameraOnLadder, rung: int) -> _Candidate | None:
        """The best step down from ``rung``; ``None`` if none saves anything."""
        loads, worth, tiers = camera.loads, self._worth, self._tiers[camera.priority]
        load, value, weight = loads[rung], worth[rung], self.weights[camera.priority]
        best, found = (math.inf, math.inf), -1
        for place in range(rung + 1, len(tiers)):
            saved = load - loads[place]
            if saved > 0:
                turn = tiers[place], (value - worth[place]) * weight / saved
                if turn < best:
                    best, found = turn, place
        return None if found < 0 else _Candidate(int(best[0]), best[1], name, found)

    def upper(self, name: str, camera: CameraOnLadder, rung: int) -> _Candidate | None:
        """The best step up from ``rung``; ``None`` at full quality. Tiers are in reverse order."""
        loads, worth, weight = camera.loads, self._worth, self.weights[camera.priority]
        best, found = math.inf, -1
        for place in range(rung - 1, -1, -1):
            extra = loads[place] - loads[rung]
            order = -(worth[place] - worth[rung]) * weight / extra if extra > 0 else -math.inf
            if found < 0 or order < best:
                best, found = order, place
        return None if found < 0 else _Candidate(-self.tier(camera.priority, rung), best, name, found)

    @cached_property
    def _worth(self) -> tuple[float, ...]:
        return tuple(rung.value for rung in self.ladder.rungs)

    @cached_property
    def _tiers(self) -> Mapping[Priority, tuple[int, ...]]:
        """For each class, the tiers of the rungs that it may step down to."""
        last = {each: len(self.ladder.rungs) for each in Priority} | {Priority.CRITICAL: self.ladder.floor + 1}
        return {each: tuple(self.tier(each, rung) for rung in range(last[each])) for each in Priority}

    def tier(self, priority: Priority, rung: int) -> int:
        """Tier of a step to ``rung``: steps of a higher tier wait until none of a lower tier is left."""
        shed = self.ladder.rungs[rung].shed
        if priority is Priority.CRITICAL:
            return 1
        return 2 if shed and priority is Priority.NORMAL else 0


FILE = "ladder.json"
"""File name of a ladder in its model's folder."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One level of quality.

    * ``name``: ``full``, ``prune``, ``refresh``, ``stride``, ``fps``, ``shed``; several of a kind have a suffix
    * ``prune``: factor on the pruner's threshold; ``stride``, ``fps``: factors on the camera's stride and sampling rate
    * ``refresh_budget``: fraction of the overlap that is recomputed; ``None``: the camera's own
    * ``shed``: no window is answered at all
    * ``kept``: factor on the mean tokens a frame keeps, anchors included: at a lower rate more changes between two
      frames, and more frames are anchors
    * ``f1``: F1 at this rung / F1 at full quality; ``source``: ``measured``, or how it was derived
    """

    name: str
    prune: float = 1.0
    refresh_budget: float | None = None
    stride: float = 1.0
    fps: float = 1.0
    shed: bool = False
    kept: float = 1.0
    f1: float = 1.0
    source: str = ""

    @property
    def value(self) -> float:
        """F1 times the fraction of answers: F1 of whole videos ignores that alerts come later at a longer stride, so
        each answer skipped counts as dropped."""
        return 0.0 if self.shed else self.f1 / self.stride

    def stride_s(self, stride_s: float, window_s: float) -> float:
        """Stride at this rung of a camera with this stride and window at full quality. Windows must touch: a stride
        longer than the window would skip the video in between."""
        return min(stride_s * self.stride, max(stride_s, window_s))

    def __post_init__(self) -> None:
        for name in ("prune", "stride", "fps", "kept"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigError(f"rung {self.name!r}: {name} is a factor above 0, not {value!r}")
        if not 0 <= self.f1 <= 1:
            raise ConfigError(f"rung {self.name!r}: f1 is a fraction of full quality's, 0 to 1, not {self.f1!r}")
        if self.refresh_budget is not None and not 0 <= self.refresh_budget <= 1:
            raise ConfigError(f"rung {self.name!r}: refresh_budget is a fraction, 0 to 1, not {self.refresh_budget!r}")


FULL = Rung("full")
"""Full quality."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rungs from full quality down, each cheaper and of no higher F1 than the one before; only the last may shed.

    ``source``: one sentence on the origin of the rungs' F1.
    """

    rungs: tuple[Rung, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.rungs or self.rungs[0] != Rung(self.rungs[0].name, source=self.rungs[0].source):
            raise ConfigError("the first rung of a ladder must be full quality, with all defaults and an f1 of 1")
        if len({rung.name for rung in self.rungs}) != len(self.rungs):
            raise ConfigError("the rungs of a ladder must have distinct names")
        for upper, lower in zip(self.rungs, self.rungs[1:], strict=False):
            if lower.f1 > upper.f1:
                raise ConfigError(f"rung {lower.name!r} must not have a higher f1 than {upper.name!r} above it")
        if any(rung.shed for rung in self.rungs[:-1]):
            raise ConfigError("only the last rung of a ladder may shed a camera")

    @property
    def floor(self) -> int:
        """The lowest rung at which windows are still answered."""
        return len(self.rungs) - 1 - self.rungs[-1].shed

    def index_of(self, name: str) -> int:
        """Index of the rung ``name``. Raises ``ConfigError``: there is none."""
        for place, rung in enumerate(self.rungs):
            if rung.name == name:
                return place
        raise ConfigError(f"there is no rung {name!r}; there are: {', '.join(rung.name for rung in self.rungs)}")

    def to_json(self) -> str:
        return json.dumps({"source": self.source, "rungs": [asdict(rung) for rung in self.rungs]}, indent=2)

    @classmethod
    def load(cls, path: Path) -> Ladder:
        """Load from a file or a model's folder. Raises ``ConfigError``: the file is missing or not a ladder."""
        file = path / FILE if path.is_dir() else path
        try:
            body = json.loads(file.read_text(encoding="utf-8"))
            return cls(tuple(Rung(**each) for each in body["rungs"]), str(body["source"]))
        except OSError:
            raise ConfigError(f"there is no ladder at {file}; make one with: sightline eval ladder") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file} is not a ladder ({error!r}); regenerate it with: sightline eval ladder"
            ) from None

    def save(self, path: Path) -> None:
        """Write a file for :meth:`load`. Raises ``SightlineError``: the file cannot be written."""
        write_text(path / FILE if path.is_dir() else path, self.to_json() + "\n")


def default() -> Ladder:
    """Default ladder for a model without its own: the usual order of rungs, with estimated F1."""
    guess = "unmeasured: a guess"
    return Ladder(
        (
            Rung("full"),
            Rung("prune", prune=1.5, kept=0.85, f1=0.99, source=guess),
            Rung("refresh", prune=1.5, refresh_budget=0.0, kept=0.85, f1=0.98, source=guess),
            Rung("stride", prune=1.5, refresh_budget=0.0, stride=2.0, kept=0.85, f1=0.93, source=guess),
            Rung("fps", prune=1.5, refresh_budget=0.0, stride=2.0, fps=0.5, kept=1.2, f1=0.85, source=guess),
            Rung("shed", shed=True, f1=0.0, source="no answer"),
        ),
        "unmeasured: this model has no ladder; make one with: sightline eval ladder",
    )
