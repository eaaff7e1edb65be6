"""Footage of any length with known truth: one camera and place, short episodes of life, and quiet in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.scenes.actors import COLORS, Actor
from cluster.lab.scenes.encode import SceneClip
from cluster.lab.scenes.events import DISTRACTORS, SceneBuilder, passer_by
from cluster.lab.scenes.layouts import ASPECT, Layout, make_layout
from cluster.lab.scenes.scene import CameraSettings, Scene, sample_camera, sample_conditions
from cluster.lab.scenes.vocabulary import SPLITS, SceneEvent, Split

# What people do. Nothing that is always there, and no vehicle: what is said of those must be certain. Nobody who runs
# through either: one near the camera is gone before two seconds, and so was never "seen".
_PEOPLE = ("crouch", "talk", "skirt_zone", "waits_with_bag")
# So long does the slowest take to where something happens.
_WALK_IN_S = 16.0
# Of a vehicle's centre, as in cluster.lab.scenes.questions: nearer to the edge it does not count as seen.
_EDGE = 0.02
_STEP_S = 0.25


@dataclass(frozen=True, slots=True)
class VehiclePass:
    """A vehicle of a colour that comes through, or stops on its lane for some seconds first."""

    color: str
    stops: bool = False


@dataclass(frozen=True, slots=True)
class Episode:
    """Everything that moves between ``start_s`` and ``end_s``; before and after the place is empty."""

    start_s: float
    end_s: float
    actors: tuple[Actor, ...]
    events: tuple[SceneEvent, ...]

    def moved(self, start_s: float, first_id: int) -> Episode:
        """The same, beginning at ``start_s``, its actors numbered from ``first_id``."""
        by = start_s - self.start_s
        actors = tuple(_later(actor, by, first_id) for actor in self.actors)
        events = tuple(
            SceneEvent(
                event.kind,
                round(event.start_s + by, 3),
                round(event.end_s + by, 3),
                tuple(number + first_id for number in event.actors),
            )
            for event in self.events
        )
        return Episode(start_s, self.end_s + by, actors, events)


def write_episode(builder: SceneBuilder, drives: Sequence[VehiclePass], people: int) -> Episode:
    """Write an episode into an empty builder.

    Args:
        builder: of the place; its length does not matter.
        drives: the vehicles, in order. No two are there at once, so none hides another or drives through it.
        people: how many times somebody (or a pair, or a group) comes. With ``drives`` empty at least 1.
    """
    for _ in range(people):
        at = builder.uniform(0, 8)
        if builder.chance(0.5):
            passer_by(builder, at)
        else:
            DISTRACTORS[str(builder.rng.choice(_PEOPLE))](builder, at + _WALK_IN_S)
    at = builder.uniform(0, 12)
    for drive in drives:
        at = _drive(builder, drive, at) + builder.uniform(1, 4)
    keys = [key for actor in builder.actors for key in actor.keys]
    return Episode(min(key.t for key in keys), max(key.t for key in keys), tuple(builder.actors), tuple(builder.events))


def visible_span(actor: Actor) -> tuple[float, float] | None:
    """When an actor is in the picture, from first to last; None for one that never is."""
    first: float | None = None
    last = second = actor.keys[0].t
    while second <= actor.keys[-1].t:
        place = actor.state_at(second)
        if place is not None and _EDGE < place.x < ASPECT - _EDGE:
            first = second if first is None else first
            last = second
        second += _STEP_S
    return None if first is None else (round(first, 3), round(last, 3))


def _drive(builder: SceneBuilder, drive: VehiclePass, at: float) -> float:
    """Write one vehicle that enters at ``at``; when it is gone."""
    near = builder.chance(0.5)
    direction = 1 if near else -1
    speed = builder.uniform(0.28, 0.5)
    if not drive.stops:
        actor = builder.drive_through(at, near=near, direction=direction, speed=speed, color=drive.color)
        return actor.keys[-1].t
    form = str(builder.rng.choice(["car", "car", "van"]))
    start, end = builder.lane_ends(direction, form, near)
    x = builder.uniform(0.45, ASPECT - 0.45)
    stop = at + abs(x - start) / speed
    leave = stop + builder.uniform(8, 14)
    gone = leave + abs(end - x) / speed
    keys = [
        builder.lane_key(at, start, near, "driving"),
        builder.lane_key(stop, x, near, "stopped"),
        builder.lane_key(leave, x, near, "driving"),
        builder.lane_key(gone, end, near, "driving"),
    ]
    actor = builder.add_actor("vehicle", keys, form=form, facing=direction, color=drive.color)
    builder.events.append(SceneEvent("stopped_vehicle", stop, leave, (actor.id,)))
    return gone


def _later(actor: Actor, by: float, first_id: int) -> Actor:
    carries = None if actor.carries is None else (actor.carries[0] + by, actor.carries[1] + by)
    keys = tuple(replace(key, t=key.t + by) for key in actor.keys)
    return replace(actor, id=actor.id + first_id, keys=keys, carries=carries)


# Leads every seed, so that none meets a seed of an ordinary scene.
_SEED = 404
_SHORTEST_S = 60.0
_LEAST_QUIET_S = 4.0
# Colours that come once or never; ordinary traffic has the others.
_RARE = 4
# When those that come once do, as shares of the length: what is asked later lies in the past for long.
_NEEDLES = (0.05, 0.6)


@dataclass(frozen=True, eq=False)
class LongScene:
    """Long footage, written first and drawn picture by picture: nothing of its length lies in memory.

    It is always a day scene of full contrast: what is said of colours must be certain.

    Args:
        seconds: length, at least 60.
        seed: the same arguments give the same footage.
        split: the layouts and camera settings to draw from; ``test`` has its own.
        quiet_s: mean time without anybody between two episodes, at least 8.
        needle_colors: vehicles that come once or never have colours of these (at least three); ordinary traffic has
            the rest.
        camera: size, rate and encoder; None draws one of the split's.

    Raises:
        ConfigError: an argument out of these bounds.
    """

    seconds: float
    seed: int
    split: Split = "test"
    quiet_s: float = 30.0
    needle_colors: tuple[str, ...] = tuple(COLORS)
    camera: CameraSettings | None = None

    def __post_init__(self) -> None:
        if self.seconds < _SHORTEST_S:
            raise ConfigError(f"footage with a past must last at least {_SHORTEST_S:.0f} s, not {self.seconds:g}")
        if self.seed < 0:
            raise ConfigError(f"a seed must be at least 0, not {self.seed}")
        if self.split not in SPLITS:
            raise ConfigError(f"unknown split {self.split!r}; there are: {', '.join(SPLITS)}")
        if self.quiet_s < 2 * _LEAST_QUIET_S:
            raise ConfigError(f"the mean quiet must last at least {2 * _LEAST_QUIET_S:.0f} s, not {self.quiet_s:g}")
        unknown = [color for color in self.needle_colors if color not in COLORS]
        if unknown:
            raise ConfigError(f"unknown colour {unknown[0]!r}; there are: {', '.join(COLORS)}")
        if len(set(self.needle_colors)) < 3:
            raise ConfigError(
                f"at least three colours are needed for rare vehicles, not {len(set(self.needle_colors))}"
            )

    @cached_property
    def scene(self) -> Scene:
        """What a renderer or encoder takes. An ordinary scene may have the same name: ``clip`` gives its own."""
        look = self._chance(1)
        return Scene(
            split=self.split,
            index=self.seed,
            seconds=self.seconds,
            layout=self._layout,
            light="day",
            strata=frozenset(),
            camera=self.camera or sample_camera(self.split, look),
            conditions=sample_conditions("day", frozenset(), look),
            actors=tuple(actor for episode in self.episodes for actor in episode.actors),
            events=tuple(event for episode in self.episodes for event in episode.events),
            tree=bool(look.random() < 0.5),
            pole=False,
            seed=int(look.integers(2**31)),
        )

    @cached_property
    def episodes(self) -> tuple[Episode, ...]:
        """When there is life, in order; before, between and after there are at least four quiet seconds."""
        rng = self._chance(2)
        rare, common = self._palette(rng)
        first, second = np.sort(rng.uniform(*_NEEDLES, size=2)) * self.seconds
        needles = [(float(first), VehiclePass(rare[0])), (float(second), VehiclePass(rare[1], stops=True))]
        if rng.random() < 0.5:
            needles = [(float(first), needles[1][1]), (float(second), needles[0][1])]
        found: list[Episode] = []
        start, actors = self._quiet(rng), 0
        while True:
            drives = [
                VehiclePass(str(rng.choice(common))) for _ in range(int(rng.choice([0, 1, 2], p=[0.35, 0.45, 0.2])))
            ]
            if needles and start >= needles[0][0]:
                drives = [needles.pop(0)[1]]
            people = int(rng.choice([0, 1, 2], p=[0.3, 0.5, 0.2])) if drives else 1
            episode = write_episode(SceneBuilder(self._layout, self.seconds, rng), drives, people).moved(start, actors)
            if episode.end_s > self.seconds - _LEAST_QUIET_S:
                return tuple(found)
            found.append(episode)
            start, actors = episode.end_s + self._quiet(rng), actors + len(episode.actors)

    @cached_property
    def moments(self) -> tuple[float, ...]:
        """Instants at which nobody is there, ascending: 0, one after every episode but the last, and the end."""
        gaps = zip(self.episodes, self.episodes[1:], strict=False)
        return (0.0, *(round((here.end_s + there.start_s) / 2, 3) for here, there in gaps), self.seconds)

    def clip(self, folder: Path) -> SceneClip:
        """The footage as a clip to encode with ``encode_missing_clips``: ``folder/past-test-000001.mp4``."""
        return SceneClip(self.scene, None, folder / f"past-{self.scene.name}.mp4")

    @cached_property
    def _layout(self) -> Layout:
        return make_layout(self.split, self._chance(0))

    def _palette(self, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """Rare colours (the first passes once, the second stops once, the others never come) and common ones."""
        drawn = [str(color) for color in rng.permutation(sorted(set(self.needle_colors)))]
        rare = drawn[:_RARE]
        return rare, [color for color in COLORS if color not in rare]

    def _quiet(self, rng: np.random.Generator) -> float:
        return float(max(_LEAST_QUIET_S, rng.uniform(0.4, 1.6) * self.quiet_s))

    def _chance(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([_SEED, SPLITS.index(self.split), self.seed, purpose])
