"""Actors (persons, vehicles and bags on keyframed paths), their colours, and the scene they are part of."""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cluster.lab.scenes.layouts import ASPECT, Color, Layout
from cluster.lab.scenes.vocabulary import SceneEvent, Split

COLORS: dict[str, Color] = {
    "red": (186, 38, 36),
    "blue": (38, 66, 164),
    "green": (40, 118, 58),
    "white": (226, 226, 222),
    "black": (32, 32, 36),
    "yellow": (216, 180, 40),
    "grey": (128, 130, 134),
}
# An actor whose centre is this close to the edge counts as not visible.
_EDGE = 0.02


@dataclass(frozen=True, slots=True)
class Keyframe:
    """Position of an actor at ``t`` seconds and its state from then on; ``lift``: off the ground, in actor heights."""

    t: float
    x: float
    y: float
    state: str
    lift: float = 0.0


@dataclass(frozen=True, slots=True)
class ActorState:
    """An actor at one instant. ``since_s``: seconds in its present state; ``vx, vy``: picture heights per second."""

    x: float
    y: float
    lift: float
    state: str
    vx: float
    vy: float
    since_s: float


@dataclass(frozen=True, slots=True)
class Actor:
    """``kind``: person, vehicle or bag. ``form``: type of a vehicle (car, van, bus) or bag (case, box, sack).

    ``carries``: interval, in seconds, in which a person holds a bag. ``facing``: fixed direction (-1, 1), 0 for the
    direction of movement. ``scale`` multiplies the size; ``seed`` varies appearance and phase of motion.
    """

    id: int
    kind: str
    keys: tuple[Keyframe, ...]
    color: str
    form: str = ""
    scale: float = 1.0
    facing: int = 0
    carries: tuple[float, float] | None = None
    contrast: float = 1.0
    seed: int = 0

    def _index(self, second: float) -> int:
        """Index of the keyframe that begins the segment at ``second``, clamped to the first and last segment."""
        return min(max(bisect.bisect_right(self.keys, second, key=lambda key: key.t) - 1, 0), len(self.keys) - 2)

    def state_at(self, second: float) -> ActorState | None:
        """Interpolated state; None before the first and after the last keyframe."""
        keys = self.keys
        if second < keys[0].t or second > keys[-1].t:
            return None
        index = self._index(second)
        here, there = keys[index], keys[index + 1]
        span = max(there.t - here.t, 1e-6)
        share = min(1.0, (second - here.t) / span)
        began = index
        while began > 0 and keys[began - 1].state == here.state:
            began -= 1
        return ActorState(
            x=here.x + share * (there.x - here.x),
            y=here.y + share * (there.y - here.y),
            lift=here.lift + share * (there.lift - here.lift),
            state=here.state,
            vx=(there.x - here.x) / span,
            vy=(there.y - here.y) / span,
            since_s=second - keys[began].t,
        )

    def visible_times(self, start_s: float, step_s: float, end_s: float) -> Iterator[float]:
        """Yield the steps from ``start_s`` to ``end_s`` at which its centre is in the picture and not at an edge."""
        second = start_s
        while second <= end_s:
            place = self.state_at(second)
            if place is not None and _EDGE < place.x < ASPECT - _EDGE:
                yield second
            second += step_s

    def direction(self, second: float) -> int:
        """-1: left, 1: right; while standing, the direction of the last (or else next) movement."""
        if self.facing:
            return self.facing
        index = self._index(second)
        for at in [*range(index, -1, -1), *range(index + 1, len(self.keys) - 1)]:
            step = self.keys[at + 1].x - self.keys[at].x
            if abs(step) > 1e-3:
                return 1 if step > 0 else -1
        return 1

    def distance_travelled(self, second: float) -> float:
        """Path length up to ``second``, in picture heights; drives the walking cycle and the wheels."""
        way = 0.0
        for here, there in zip(self.keys, self.keys[1:], strict=False):
            if second <= here.t:
                break
            share = min(1.0, (second - here.t) / max(there.t - here.t, 1e-6))
            way += share * float(np.hypot(there.x - here.x, there.y - here.y))
        return way


@dataclass(frozen=True, slots=True)
class CameraSettings:
    """Frame size, frame rate and encoder. ``gop_s``: seconds between I-frames; ``crf``: of x264 or x265."""

    width: int
    height: int
    fps: float
    codec: str
    gop_s: float
    bframes: int
    crf: int


@dataclass(frozen=True, slots=True)
class Conditions:
    """Light, weather and sensor. ``noise`` in grey levels; ``flicker`` and ``drift``: amplitude of relative gain;
    ``rain`` in 0..1."""

    tint: tuple[float, float, float]
    level: float
    drift: float = 0.0
    drift_s: float = 1.0
    noise: float = 0.0
    flicker: float = 0.0
    rain: float = 0.0
    monochrome: bool = False

    def gain(self, second: float, number: int) -> float:
        """Brightness factor at ``second`` in frame ``number``; 1 in steady daylight."""
        drift = 1.0 + self.drift * math.sin(2 * math.pi * second / self.drift_s)
        beat = self.flicker * math.sin(2 * math.pi * 0.37 * number)
        return self.level * drift * (1.0 + beat)


@dataclass(frozen=True, slots=True)
class Scene:
    """A scripted scene, see ``make_scene``. ``strata``: difficulties; ``tree`` and ``pole``: foreground objects."""

    split: Split
    index: int
    seconds: float
    layout: Layout
    light: str
    strata: frozenset[str]
    camera: CameraSettings
    conditions: Conditions
    actors: tuple[Actor, ...]
    events: tuple[SceneEvent, ...]
    tree: bool
    pole: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.index:06d}"
