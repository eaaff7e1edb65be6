"""A scene: everything that will be seen by one camera, decided before the first picture is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.scenes.actors import Actor
from cluster.lab.scenes.camera import CameraSettings, Conditions, draw_camera, draw_conditions
from cluster.lab.scenes.events import DISTRACTORS, EVENTS, Script, passer_by, traffic
from cluster.lab.scenes.places import Layout, make_layout
from cluster.lab.scenes.vocabulary import EVENT_KINDS, SPLITS, SceneEvent, Split

# Seeds never meet: a split's number leads every one of them.
_SPLIT_SEEDS = {"train": 101, "validation": 202, "test": 303}
_EARLIEST_S = 6.5
_ROOM_AFTER_S = 14.0
_SHORTEST_S = 24.0


@dataclass(frozen=True, slots=True)
class Scene:
    """See ``make_scene``. ``strata`` names what is hard about it; ``tree`` and ``pole`` stand before the camera."""

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


def make_scene(
    split: Split, index: int, *, seconds: float = 40.0, event: str | tuple[str, ...] | None = "any"
) -> Scene:
    """Write scene ``index`` of a split; the same arguments give the same scene.

    Args:
        split: train, validation or test. Their seeds are disjoint, and test has layouts, textures and camera settings
            of its own.
        index: at least 0.
        seconds: length, at least 24.
        event: ``any`` draws none, one or two events; a kind forces that one, several kinds those; None allows
            distractors only.

    Raises:
        ConfigError: an unknown split or event, a negative index, a scene too short for an event.
    """
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}; there are: {', '.join(SPLITS)}")
    unknown = [kind for kind in (event if isinstance(event, tuple) else (event,)) if kind not in EVENT_KINDS]
    if unknown and event not in (None, "any"):
        raise ConfigError(f"unknown event {unknown[0]!r}; there are: {', '.join(EVENT_KINDS)}")
    if index < 0:
        raise ConfigError(f"a scene's index must be at least 0, not {index}")
    if seconds < _SHORTEST_S:
        raise ConfigError(f"a scene must last at least {_SHORTEST_S:.0f} s, not {seconds:g}")
    rng = np.random.default_rng([_SPLIT_SEEDS[split], index])
    kinds = _draw_events(event, rng)
    strata, light = _draw_strata(rng)
    layout = make_layout(split, rng)
    script = Script(layout, seconds, rng)
    latest = max(_EARLIEST_S + 0.5, seconds - _ROOM_AFTER_S)
    script.contrast = script.between(0.5, 0.65) if "low_contrast" in strata else script.between(0.85, 1.0)
    script.pace = script.between(0.5, 0.65) if "slow" in strata else 1.0
    for kind in kinds:
        EVENTS[kind](script, script.between(_EARLIEST_S, latest))
    script.contrast = 1.0
    # Training has more of what looks like an event: it is what most wrong alarms are about.
    likely = (1, 6) if split == "train" else (0, 4)
    _fill(script, crowded="crowd" in strata, busy_road="wrong_way" not in kinds, distractors=likely)
    return Scene(
        split=split,
        index=index,
        seconds=seconds,
        layout=layout,
        light=light,
        strata=strata,
        camera=draw_camera(split, rng),
        conditions=draw_conditions(light, strata, rng),
        actors=tuple(script.actors),
        events=tuple(sorted(script.events, key=lambda each: each.start_s)),
        tree=script.chance(0.5),
        pole=script.chance(0.35),
        seed=int(rng.integers(2**31)),
    )


def _draw_events(event: str | tuple[str, ...] | None, rng: np.random.Generator) -> list[str]:
    if event is None:
        return []
    if isinstance(event, tuple):
        return list(event)
    if event != "any":
        return [event]
    count = int(rng.choice([0, 1, 2], p=[0.22, 0.45, 0.33]))
    return [str(kind) for kind in rng.choice(EVENT_KINDS, size=count, replace=False)]


def _draw_strata(rng: np.random.Generator) -> tuple[frozenset[str], str]:
    light = str(rng.choice(["day", "dusk", "night"], p=[0.58, 0.17, 0.25]))
    drawn = {
        name
        for name, share in (("noisy", 0.25), ("low_contrast", 0.2), ("slow", 0.2), ("rain", 0.12), ("crowd", 0.15))
        if rng.random() < share
    }
    return frozenset(drawn | ({"night"} if light == "night" else set())), light


def _fill(script: Script, *, crowded: bool, busy_road: bool, distractors: tuple[int, int]) -> None:
    """Ordinary life, and things that look like events; of these at least the first and fewer than the second number of
    ``distractors``."""
    for _ in range(int(script.rng.integers(4, 8)) if crowded else int(script.rng.integers(0, 4))):
        passer_by(script, script.between(-6, script.seconds - 3))
    for _ in range(int(script.rng.integers(0, 5)) if busy_road else int(script.rng.integers(0, 3))):
        traffic(script, script.between(-4, script.seconds - 3))
    names = list(DISTRACTORS)
    for name in script.rng.choice(names, size=int(script.rng.integers(*distractors)), replace=False):
        DISTRACTORS[str(name)](script, script.between(3, script.seconds - 8))
