"""Clips of one street under four conditions, of any length, rate and size, rendered and encoded like all scenes."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.scenes.actors import CameraSettings, Conditions, Keyframe, Scene
from cluster.lab.scenes.encode import encode_scene
from cluster.lab.scenes.events import SceneBuilder
from cluster.lab.scenes.layouts import ASPECT, NO_ZONE, Layout
from cluster.lab.scenes.truth import SceneTruth

CYCLE_S = 24.0
FAR_WALK, NEAR_WALK = 0.44, 0.95
DOOR_X = 0.4 * ASPECT
# Colours that stand out from wall, pavement and road.
_COLORS = ("red", "blue", "white", "black", "yellow")


@dataclass(frozen=True, slots=True)
class ClipKind:
    """Appearance and encoding of a kind of clip. ``movers``: whether anything moves."""

    conditions: Conditions
    light: str = "day"
    codec: str = "h264"
    crf: int = 23
    bframes: int = 0
    movers: bool = True


_DAY, _DUSK, _NIGHT = (1.0, 1.0, 0.98), (1.06, 0.95, 0.9), (0.88, 0.96, 1.2)
CLIP_KINDS: dict[str, ClipKind] = {
    # A quiet street with a few people and vans.
    "street": ClipKind(Conditions(_DAY, level=1.0)),
    # The same street through a poor sensor.
    "noisy": ClipKind(Conditions(_DAY, level=1.0, noise=6.5, flicker=0.04), bframes=2),
    "hevc": ClipKind(Conditions(_DUSK, level=0.68), light="dusk", codec="hevc", crf=26),
    "night": ClipKind(Conditions(_NIGHT, level=0.23, noise=1.8), light="night", movers=False),
}


def make_clip(
    kind: str,
    path: str | Path,
    *,
    seconds: float = 24.0,
    fps: float = 12.5,
    size: tuple[int, int] = (640, 360),
    seed: int = 0,
    crf: int | None = None,
    gop_s: float = 4.0,
) -> SceneTruth:
    """Render and encode one clip of :data:`CLIP_KINDS`; saves its ground truth as JSON beside it and returns that.

    The script repeats with variations every 24 s; equal arguments give equal clips. ``size``: width and height in
    pixels, both even. ``crf``: for x264 or x265, 0 to 51, instead of the kind's own; ``gop_s``: seconds between
    I-frames. Raises ``ConfigError``: unknown kind, or invalid length, rate or size.
    """
    if kind not in CLIP_KINDS:
        raise ConfigError(f"unknown clip {kind!r}; there are: {', '.join(sorted(CLIP_KINDS))}")
    width, height = size
    if width < 64 or height < 64 or width % 2 or height % 2:
        raise ConfigError(f"a clip's width and height must be even and at least 64 pixels, not {width}x{height}")
    if fps <= 0 or round(seconds * fps) < 1:
        raise ConfigError(f"a clip needs at least one frame, not {seconds} s at {fps} frames per second")
    style = CLIP_KINDS[kind]
    quality = style.crf if crf is None else crf
    camera = CameraSettings(width, height, fps, style.codec, gop_s, style.bframes, quality)
    return encode_scene(street_scene(style, camera, seconds, seed), path, event=None)


def street_scene(style: ClipKind, camera: CameraSettings, seconds: float, seed: int) -> Scene:
    """Script of the street: every 24 s a person walks up, sits at the door and leaves, two vans pass, one person walks
    by and one crosses the road."""
    layout = Layout(
        "street",
        horizon=0.37,
        road=0.635,
        slope=0.0,
        lane=0.165,
        median=0.0,
        body=0.17,
        zone=NO_ZONE,
        textures=("gravel", "gravel", "brick"),
        seed=seed,
    )
    builder = SceneBuilder(layout, seconds, np.random.default_rng([seed, 2]))
    for cycle in range(math.ceil(seconds / CYCLE_S) if style.movers else 0):
        _add_cycle(builder, cycle * CYCLE_S)
    return Scene(
        split="validation",
        index=seed,
        seconds=seconds,
        layout=layout,
        light=style.light,
        strata=frozenset({"noisy"} if style.conditions.flicker else ()),
        camera=camera,
        conditions=style.conditions,
        actors=tuple(builder.actors),
        events=(),
        tree=False,
        pole=True,
        seed=seed,
    )


def _add_cycle(builder: SceneBuilder, start: float) -> None:
    def at(second: float) -> float:
        return start + second + builder.uniform(-0.4, 0.4)

    def walks(*places: tuple[float, float, float], waiting: int | None = None) -> None:
        """Add a person who walks through (second, x, y) points and sits between points ``waiting`` and the next."""
        states = ["sitting" if number == waiting else "walking" for number in range(len(places))]
        keys = [Keyframe(*place, state) for place, state in zip(places, states, strict=True)]
        builder.add_actor("person", keys, color=color())

    def color() -> str:
        return str(builder.rng.choice(_COLORS))

    come, sit, go = at(0.8), at(7.5), at(14.0)
    left, right = builder.outside_x(1), builder.outside_x(-1)
    walks((come, left, FAR_WALK), (sit, DOOR_X, FAR_WALK), (go, DOOR_X, FAR_WALK), (go + 9, right, FAR_WALK), waiting=1)
    builder.drive_through(at(4.5), near=True, direction=1, speed=0.73, form="van", scale=0.8, color=color())
    begin = at(9.0)
    walks((begin, right, NEAR_WALK), (begin + 9.5, left, NEAR_WALK))
    builder.drive_through(at(14.0), near=False, direction=-1, speed=0.62, form="van", scale=0.8, color=color())
    steps = at(18.8)
    x = 0.3 * ASPECT
    walks((steps, x, NEAR_WALK + 0.3), (steps + 2, x, 0.9), (steps + 6, 0.33 * ASPECT, FAR_WALK + 0.01))
