"""Scripting of scenes: everything a camera will see, decided before the first frame is drawn."""

import math

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.scenes.actors import CameraSettings, Conditions, Scene
from cluster.lab.scenes.events import DISTRACTORS, EVENTS, SceneBuilder, passer_by, traffic
from cluster.lab.scenes.layouts import make_layout
from cluster.lab.scenes.render import seen_share
from cluster.lab.scenes.vocabulary import EVENT_KINDS, SPLITS, Split

# Camera settings of train and validation, and of test; the two lists are disjoint.
_CAMERAS: dict[str, list[CameraSettings]] = {
    "train": [
        CameraSettings(640, 360, 10.0, "h264", 2.0, 0, 25),
        CameraSettings(640, 360, 15.0, "h264", 1.0, 0, 28),
        CameraSettings(640, 360, 12.5, "h264", 4.0, 2, 23),
        CameraSettings(640, 360, 10.0, "hevc", 4.0, 0, 27),
        CameraSettings(480, 270, 15.0, "h264", 8.0, 0, 24),
    ],
    "test": [
        CameraSettings(704, 396, 12.0, "h264", 3.0, 0, 27),
        CameraSettings(640, 360, 20.0, "h264", 10.0, 0, 30),
        CameraSettings(576, 324, 15.0, "h264", 5.0, 3, 26),
        CameraSettings(640, 360, 12.0, "hevc", 6.0, 2, 29),
        CameraSettings(800, 450, 10.0, "hevc", 1.5, 0, 31),
        CameraSettings(640, 360, 25.0, "h264", 2.5, 1, 32),
    ],
}


def sample_camera(split: Split, rng: np.random.Generator) -> CameraSettings:
    """Draw camera settings for a split."""
    pool = _CAMERAS["test" if split == "test" else "train"]
    return pool[int(rng.integers(len(pool)))]


def sample_conditions(light: str, strata: frozenset[str], rng: np.random.Generator) -> Conditions:
    """Draw light, weather and sensor for a scene of these strata."""
    noisy = "noisy" in strata
    level = {"day": rng.uniform(0.85, 1.08), "dusk": rng.uniform(0.58, 0.72), "night": rng.uniform(0.4, 0.54)}[light]
    tint = {"day": (1.0, 1.0, 0.98), "dusk": (1.06, 0.95, 0.9), "night": (0.9, 0.97, 1.16)}[light]
    return Conditions(
        tint=tint,
        level=float(level),
        drift=float(rng.uniform(0.0, 0.06)),
        drift_s=float(rng.uniform(18, 60)),
        noise=float(rng.uniform(4.0, 6.5) if noisy else rng.uniform(0.3, 1.8)),
        flicker=float(rng.uniform(0.02, 0.05) if noisy else 0.0),
        rain=float(rng.uniform(0.5, 1.0) if "rain" in strata else 0.0),
        monochrome=bool(light == "night" and rng.random() < 0.5),
    )


# First part of every seed, so that splits are disjoint.
_SPLIT_SEEDS = {"train": 101, "validation": 202, "test": 303}
_EARLIEST_S = 6.5
_MIN_AFTER_EVENT_S = 14.0
_MIN_LENGTH_S = 24.0
# Minimum share of an event's time at which at least half of it must be visible.
_IN_VIEW = 0.75
_TRIES = 1000


def make_scene(
    split: Split, index: int, *, seconds: float = 40.0, event: str | tuple[str, ...] | None = "any"
) -> Scene:
    """Script scene ``index`` of a split, ``seconds`` (at least 24) long, deterministically.

    The splits' seeds are disjoint; test has its own layouts, textures and camera settings. ``event``: ``any`` draws
    zero to two events; a kind or a tuple of kinds forces these; None allows distractors only. Scenes in which an event
    is occluded are redrawn, as what nobody can see has no right answer. Raises ``ConfigError``: unknown split or event,
    negative index, or a scene too short for an event.
    """
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}; there are: {', '.join(SPLITS)}")
    unknown = [kind for kind in (event if isinstance(event, tuple) else (event,)) if kind not in EVENT_KINDS]
    if unknown and event not in (None, "any"):
        raise ConfigError(f"unknown event {unknown[0]!r}; there are: {', '.join(EVENT_KINDS)}")
    if index < 0:
        raise ConfigError(f"a scene's index must be at least 0, not {index}")
    if not _MIN_LENGTH_S <= seconds < math.inf:
        raise ConfigError(f"a scene must last at least {_MIN_LENGTH_S:.0f} s, not {seconds:g}")
    rng = np.random.default_rng([_SPLIT_SEEDS[split], index])
    kinds = _draw_events(event, rng)
    strata, light = _draw_strata(split, rng)
    for _ in range(_TRIES):
        scene = _draw_scene(split, index, seconds, kinds, strata, light, rng)
        if all(seen_share(scene, each) >= _IN_VIEW for each in scene.events):
            return scene
    raise AssertionError(f"no scene of {', '.join(kinds)} leaves its events in view")


def _draw_scene(
    split: Split,
    index: int,
    seconds: float,
    kinds: list[str],
    strata: frozenset[str],
    light: str,
    rng: np.random.Generator,
) -> Scene:
    layout = make_layout(split, rng)
    builder = SceneBuilder(layout, seconds, rng)
    latest = max(_EARLIEST_S + 0.5, seconds - _MIN_AFTER_EVENT_S)
    builder.contrast = builder.uniform(0.5, 0.65) if "low_contrast" in strata else builder.uniform(0.85, 1.0)
    builder.pace = builder.uniform(0.5, 0.65) if "slow" in strata else 1.0
    for kind in kinds:
        EVENTS[kind](builder, builder.uniform(_EARLIEST_S, latest))
    builder.contrast = 1.0
    # More look-alikes in training: they cause most false positives.
    distractors = (1, 6) if split == "train" else (0, 4)
    _add_background(builder, crowded="crowd" in strata, busy_road="wrong_way" not in kinds, distractors=distractors)
    return Scene(
        split=split,
        index=index,
        seconds=seconds,
        layout=layout,
        light=light,
        strata=strata,
        camera=sample_camera(split, rng),
        conditions=sample_conditions(light, strata, rng),
        actors=tuple(builder.actors),
        events=tuple(sorted(builder.events, key=lambda each: each.start_s)),
        tree=builder.chance(0.5),
        pole=builder.chance(0.35),
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


# Shares of light and difficulties. Training has more of what a model learns last: nights and crowds.
_LIGHTS = {"day": 0.58, "dusk": 0.17, "night": 0.25}
_STRATA = {"noisy": 0.25, "low_contrast": 0.2, "slow": 0.2, "rain": 0.12, "crowd": 0.15}
_TRAIN_LIGHTS = {"day": 0.4, "dusk": 0.18, "night": 0.42}
_TRAIN_STRATA = {**_STRATA, "noisy": 0.3, "crowd": 0.25}


def _draw_strata(split: Split, rng: np.random.Generator) -> tuple[frozenset[str], str]:
    lights, strata = (_TRAIN_LIGHTS, _TRAIN_STRATA) if split == "train" else (_LIGHTS, _STRATA)
    light = str(rng.choice([*lights], p=[*lights.values()]))
    drawn = {name for name, share in strata.items() if rng.random() < share}
    return frozenset(drawn | ({"night"} if light == "night" else set())), light


def _add_background(builder: SceneBuilder, *, crowded: bool, busy_road: bool, distractors: tuple[int, int]) -> None:
    """Add passers-by, traffic and look-alikes of events, whose number is drawn from ``range(*distractors)``."""
    for _ in range(int(builder.rng.integers(4, 8)) if crowded else int(builder.rng.integers(0, 4))):
        passer_by(builder, builder.uniform(-6, builder.seconds - 3))
    for _ in range(int(builder.rng.integers(0, 5)) if busy_road else int(builder.rng.integers(0, 3))):
        traffic(builder, builder.uniform(-4, builder.seconds - 3))
    names = list(DISTRACTORS)
    for name in builder.rng.choice(names, size=int(builder.rng.integers(*distractors)), replace=False):
        DISTRACTORS[str(name)](builder, builder.uniform(3, builder.seconds - 8))
