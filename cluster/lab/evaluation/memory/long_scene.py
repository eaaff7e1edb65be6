"""Long synthetic footage with ground truth: one camera, episodes of activity separated by quiet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.scenes.actors import COLORS, Actor, CameraSettings, Scene
from cluster.lab.scenes.encode import SceneClip
from cluster.lab.scenes.events import DISTRACTORS, EVENTS, SceneBuilder, passer_by
from cluster.lab.scenes.layouts import ASPECT, Layout, make_layout
from cluster.lab.scenes.scene import sample_camera, sample_conditions
from cluster.lab.scenes.vocabulary import EVENT_KINDS, SPLITS, SceneEvent, Split

# Distractors with people only, without permanent ones and runners (who may be visible for less than two seconds).
_PEOPLE = ("crouch", "talk", "skirt_zone", "waits_with_bag")
# Maximum time to walk to the place of action.
_WALK_IN_S = 16.0
# Length of an episode with an event; fallen persons and left objects then disappear.
_EVENT_EPISODE_S = 40.0
_STEP_S = 0.25


@dataclass(frozen=True, slots=True)
class VehiclePass:
    """A vehicle that passes; with ``stops`` it halts on its lane for some seconds."""

    color: str
    stops: bool = False


@dataclass(frozen=True, slots=True)
class Episode:
    """Actors and events between ``start_s`` and ``end_s``, outside of which the scene is empty."""

    start_s: float
    end_s: float
    actors: tuple[Actor, ...]
    events: tuple[SceneEvent, ...]

    def moved(self, start_s: float, first_id: int) -> Episode:
        """The episode shifted to ``start_s``, its actors numbered from ``first_id``."""
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
    """Script an episode in an empty builder of any length. ``drives``: vehicles in order, one at a time so that none
    hides another; ``people``: number of passing persons or groups, at least 1 without ``drives``."""
    for _ in range(people):
        at = builder.uniform(0, 8)
        if builder.chance(0.5):
            passer_by(builder, at)
        else:
            DISTRACTORS[str(builder.rng.choice(_PEOPLE))](builder, at + _WALK_IN_S)
    at = builder.uniform(0, 12)
    for drive in drives:
        at = _drive(builder, drive, at) + builder.uniform(1, 4)
    return _episode(builder)


def write_event_episode(builder: SceneBuilder, kind: str, colors: Sequence[str]) -> Episode:
    """Script an episode with one event in an empty builder, whose length limits it; ``colors``: of its vehicles."""
    EVENTS[kind](builder, _WALK_IN_S + builder.uniform(0, 4))
    builder.actors = [
        replace(actor, color=str(builder.rng.choice(colors))) if actor.kind == "vehicle" else actor
        for actor in builder.actors
    ]
    return _episode(builder)


def _episode(builder: SceneBuilder) -> Episode:
    keys = [key for actor in builder.actors for key in actor.keys]
    return Episode(min(key.t for key in keys), max(key.t for key in keys), tuple(builder.actors), tuple(builder.events))


def visible_span(actor: Actor) -> tuple[float, float] | None:
    """First and last time in seconds at which an actor is visible; None if never."""
    times = list(actor.visible_times(actor.keys[0].t, _STEP_S, actor.keys[-1].t))
    return (round(times[0], 3), round(times[-1], 3)) if times else None


def _drive(builder: SceneBuilder, drive: VehiclePass, at: float) -> float:
    """Script one vehicle that enters at ``at``; returns when it has left."""
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


# First part of every seed, disjoint from that of ordinary scenes.
_SEED = 404
_MIN_LENGTH_S = 60.0
_MIN_QUIET_S = 4.0
# Number of rare colours, which occur once or never.
_RARE_COLORS = 4
# Range of the times of the rare vehicles, as shares of the length.
_NEEDLES = (0.05, 0.6)


@dataclass(frozen=True, eq=False)
class LongScene:
    """Long footage, scripted up front and rendered frame by frame in constant memory.

    Always in daylight and at full contrast, so that colours are unambiguous.

    Args:
        seconds: length, at least 60.
        seed: the same arguments give the same footage.
        quiet_s: mean quiet time between two episodes, at least 8.
        event_share: share of the episodes, needles aside, that show an event of any of the six kinds.
        camera: size, rate and encoder; None draws one of the split's.
        split: models are evaluated on ``test``; splits share no scene.

    Raises:
        ConfigError: an argument is out of range.
    """

    seconds: float
    seed: int
    quiet_s: float = 30.0
    event_share: float = 0.0
    camera: CameraSettings | None = None
    split: Split = "test"

    def __post_init__(self) -> None:
        if self.seconds < _MIN_LENGTH_S:
            raise ConfigError(f"long footage must last at least {_MIN_LENGTH_S:.0f} s, not {self.seconds:g}")
        if self.seed < 0:
            raise ConfigError(f"a seed must be at least 0, not {self.seed}")
        if self.quiet_s < 2 * _MIN_QUIET_S:
            raise ConfigError(f"the mean quiet time must be at least {2 * _MIN_QUIET_S:.0f} s, not {self.quiet_s:g}")

    @cached_property
    def scene(self) -> Scene:
        """The scene, for renderer and encoder. An ordinary scene may have the same name; use ``clip`` for paths."""
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
        """Episodes in order, with at least four quiet seconds before, between and after."""
        rng, events = self._chance(2), self._chance(3)
        # The first rare colour passes once, the second stops once, the others never occur.
        rare = [str(color) for color in rng.permutation(sorted(COLORS))[:_RARE_COLORS]]
        common = [color for color in COLORS if color not in rare]
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
            needle = bool(needles) and start >= needles[0][0]
            if needle:
                drives = [needles.pop(0)[1]]
            people = int(rng.choice([0, 1, 2], p=[0.3, 0.5, 0.2])) if drives else 1
            if not needle and events.random() < self.event_share:
                builder = SceneBuilder(self._layout, _EVENT_EPISODE_S, events)
                episode = write_event_episode(builder, str(events.choice(EVENT_KINDS)), common)
            else:
                episode = write_episode(SceneBuilder(self._layout, self.seconds, rng), drives, people)
            episode = episode.moved(start, actors)
            if episode.end_s > self.seconds - _MIN_QUIET_S:
                return tuple(found)
            found.append(episode)
            start, actors = episode.end_s + self._quiet(rng), actors + len(episode.actors)

    @cached_property
    def quiet_instants(self) -> tuple[float, ...]:
        """Instants at which no actor is visible, ascending: 0, one after every episode but the last, and the end."""
        gaps = zip(self.episodes, self.episodes[1:], strict=False)
        return (0.0, *(round((here.end_s + there.start_s) / 2, 3) for here, there in gaps), self.seconds)

    def clip(self, folder: Path) -> SceneClip:
        """Clip for ``encode_missing_clips``: ``folder/past-test-000001.mp4``."""
        return SceneClip(self.scene, None, folder / f"past-{self.scene.name}.mp4")

    @cached_property
    def _layout(self) -> Layout:
        return make_layout(self.split, self._chance(0))

    def _quiet(self, rng: np.random.Generator) -> float:
        return float(max(_MIN_QUIET_S, rng.uniform(0.4, 1.6) * self.quiet_s))

    def _chance(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([_SEED, SPLITS.index(self.split), self.seed, purpose])
