"""Demo clips of one street in four conditions, with ground truth of what moves where."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from pydantic import TypeAdapter

from cluster.errors import ConfigError
from cluster.lab.scenes.encode import VideoEncoding, write_video
from cluster.lab.scenes.street_sprites import (
    DAY,
    DOOR_X,
    DUSK,
    FAR_LANE,
    FAR_WALK,
    NEAR_LANE,
    NEAR_WALK,
    NIGHT,
    STEPS,
    Light,
    PersonLook,
    PixelColor,
    Sprite,
    car,
    paint_street,
    person,
)
from cluster.lab.scenes.truth import truth_path

CYCLE_S = 24.0

_CARS: tuple[PixelColor, ...] = (
    (178, 34, 36),
    (36, 74, 148),
    (226, 228, 230),
    (46, 48, 52),
    (214, 160, 44),
    (70, 120, 92),
)
_COATS: tuple[PixelColor, ...] = (
    (196, 60, 48),
    (44, 84, 150),
    (226, 196, 88),
    (70, 130, 84),
    (208, 208, 212),
    (36, 34, 40),
)
_TROUSERS: tuple[PixelColor, ...] = ((44, 50, 70), (36, 34, 34), (120, 104, 82), (78, 84, 96))
_HAIR: tuple[PixelColor, ...] = ((34, 24, 18), (92, 60, 32), (150, 118, 66), (120, 118, 116))
_SKIN: tuple[PixelColor, ...] = ((224, 178, 146), (190, 138, 104), (128, 86, 60))

Key = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class StreetActor:
    """A person or car. ``keys``: (second, x, y) of its foot in shares of the picture, interpolated linearly.

    It exists from its first to its last key.
    """

    id: int
    kind: Literal["person", "car"]
    look: PersonLook | PixelColor
    keys: tuple[Key, ...]

    def place(self, second: float) -> tuple[float, float, float, float] | None:
        """(x, y, velocity in x, speed) in shares of the picture (per second); None when absent."""
        for (t0, x0, y0), (t1, x1, y1) in zip(self.keys, self.keys[1:], strict=False):
            if t0 <= second < t1:
                share = (second - t0) / (t1 - t0)
                vx, vy = (x1 - x0) / (t1 - t0), (y1 - y0) / (t1 - t0)
                return x0 + share * (x1 - x0), y0 + share * (y1 - y0), vx, math.hypot(vx, vy)
        return None

    def leftwards(self, second: float) -> bool:
        """Whether it faces left: the direction it moves in, or last moved in."""
        left = False
        for (t0, x0, _), (_, x1, _) in zip(self.keys, self.keys[1:], strict=False):
            if t0 > second:
                break
            left = x1 < x0 if x1 != x0 else left
        return left


def street_actors(seconds: float, seed: int) -> list[StreetActor]:
    """A quiet street; every 24 s a person walks up, waits at the door and leaves, two cars pass, one person passes by
    and one crosses the road."""
    rng = np.random.default_rng([seed, 2])
    scripts = [script for cycle in range(math.ceil(seconds / CYCLE_S)) for script in _story_cycle(cycle * CYCLE_S, rng)]
    actors: list[StreetActor] = []
    for number, (kind, keys) in enumerate(scripts):
        look = _person_look(rng) if kind == "person" else _CARS[rng.integers(len(_CARS))]
        actors.append(StreetActor(number, kind, look, keys))
    return actors


def _story_cycle(start: float, rng: np.random.Generator) -> Iterator[tuple[Literal["person", "car"], tuple[Key, ...]]]:
    def at(second: float) -> float:
        return start + second + float(rng.uniform(-0.4, 0.4))

    come, stop, go = at(0.8), at(7.5), at(14.0)
    door = DOOR_X - 0.02
    yield "person", ((come, -0.05, FAR_WALK), (stop, door, FAR_WALK), (go, door, FAR_WALK), (go + 9, 1.05, FAR_WALK))
    passes = at(4.5)
    yield "car", ((passes, -0.2, NEAR_LANE), (passes + 3.4, 1.2, NEAR_LANE))
    walks = at(9.0)
    yield "person", ((walks, 1.06, NEAR_WALK), (walks + 9.5, -0.06, NEAR_WALK))
    returns = at(14.0)
    yield "car", ((returns, 1.2, FAR_LANE), (returns + 4.0, -0.2, FAR_LANE))
    steps = at(18.8)
    yield "person", ((steps, 0.3, NEAR_WALK + 0.3), (steps + 2, 0.3, 0.9), (steps + 6, 0.33, FAR_WALK + 0.01))


def _person_look(rng: np.random.Generator) -> PersonLook:
    def pick(colors: tuple[PixelColor, ...]) -> PixelColor:
        return colors[int(rng.integers(len(colors)))]

    return PersonLook(pick(_COATS), pick(_TROUSERS), pick(_HAIR), pick(_SKIN))


Picture = npt.NDArray[np.uint8]

_PERSON_HEIGHT = 0.15
_CAR_HEIGHT = 0.135
_STRIDE_PER_HEIGHT = 0.85
_NOISE_FIELDS = 64


@dataclass(frozen=True, slots=True)
class ClipKind:
    """Look and encoding of a kind of clip. ``noise`` in grey levels, ``flicker`` as relative gain."""

    about: str
    codec: str
    options: dict[str, str]
    light: Light = DAY
    movers: bool = True
    noise: float = 0.0
    flicker: float = 0.0
    bframes: int = 0


# mbtree makes x264 with B-frames nondeterministic.
_X264 = {"preset": "veryfast", "crf": "23", "x264-params": "mbtree=0"}
_X265 = {"preset": "ultrafast", "crf": "26", "x265-params": "log-level=error:pools=none:frame-threads=1:bframes=0"}

CLIP_KINDS: dict[str, ClipKind] = {
    "street": ClipKind("a quiet street with a few people and cars", "libx264", _X264),
    "noisy": ClipKind(
        "the same street through a poor sensor: noise, flicker, B-frames",
        "libx264",
        _X264,
        noise=5.0,
        flicker=0.04,
        bframes=2,
    ),
    "hevc": ClipKind("the street at dusk, in HEVC", "libx265", _X265, light=DUSK),
    "night": ClipKind("the street at night; nothing moves", "libx264", _X264, light=NIGHT, movers=False, noise=1.2),
}


@dataclass(frozen=True, slots=True)
class StreetObject:
    """One object in one frame. ``box``: left, top, right, bottom in pixels inside the picture, without its shadow."""

    id: int
    kind: str
    box: tuple[int, int, int, int]
    moving: bool


@dataclass(frozen=True, slots=True)
class ClipTruth:
    """Ground truth of a clip; ``frames[i]``: objects visible in frame ``i`` (``i / fps`` seconds)."""

    kind: str
    seed: int
    width: int
    height: int
    fps: float
    frames: list[list[StreetObject]] = field(default_factory=list)

    def at(self, second: float) -> list[StreetObject]:
        """Objects of the frame shown at ``second``."""
        index = min(max(0, math.floor(second * self.fps + 1e-6)), len(self.frames) - 1)
        return self.frames[index]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> ClipTruth:
        """Read what :meth:`save` wrote."""
        return TypeAdapter(cls).validate_json(path.read_bytes())


def make_clip(
    kind: str,
    path: str | Path,
    *,
    seconds: float = 24.0,
    fps: float = 12.5,
    size: tuple[int, int] = (640, 360),
    seed: int = 0,
    crf: int | None = None,
) -> ClipTruth:
    """Draw and encode one clip, save its truth as JSON beside it and return it.

    Args:
        kind: one of ``CLIP_KINDS``.
        path: of the MP4; its folder must exist.
        seconds: length; the story repeats with variations every 24 s.
        fps: frames per second.
        size: width and height in pixels, both even.
        seed: same seed, same clip.
        crf: quality for x264 or x265, 0 to 51, instead of the kind's own.

    Raises:
        ConfigError: unknown kind, or invalid length, rate or size.
    """
    if kind not in CLIP_KINDS:
        raise ConfigError(f"unknown clip {kind!r}; there are: {', '.join(sorted(CLIP_KINDS))}")
    width, height = size
    if width < 64 or height < 64 or width % 2 or height % 2:
        raise ConfigError(f"a clip's width and height must be even and at least 64 pixels, not {width}x{height}")
    frames = round(seconds * fps)
    if frames < 1 or fps <= 0:
        raise ConfigError(f"a clip needs at least one frame, not {seconds} s at {fps} frames per second")
    style = CLIP_KINDS[kind]
    options = style.options if crf is None else {**style.options, "crf": str(crf)}
    encoding = VideoEncoding(
        style.codec, options, width, height, fps, gop=max(1, round(4 * fps)), bframes=style.bframes
    )
    path = Path(path)
    truth = ClipTruth(kind, seed, width, height, fps)
    write_video(path, encoding, _sensor_frames(truth, frames))
    truth.save(truth_path(path))
    return truth


def _sensor_frames(truth: ClipTruth, count: int) -> Iterator[VideoFrame]:
    sensor = _Sensor(CLIP_KINDS[truth.kind], truth.width, truth.height, truth.fps, truth.seed)
    for number, picture in enumerate(draw_frames(truth.kind, truth, count)):
        frame = VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
        sensor.add_noise(frame, number)
        yield frame


def draw_frames(kind: str, truth: ClipTruth, frames: int) -> Iterator[Picture]:
    """Frames ``[height, width, 3]`` uint8 before sensor noise; appends to ``truth.frames``.

    Each array is valid until the next is requested.
    """
    style = CLIP_KINDS[kind]
    backdrop = paint_street(truth.width, truth.height, style.light, truth.seed)
    actors = street_actors(frames / truth.fps, truth.seed) if style.movers else []
    stage = _ActorPainter(truth.width, truth.height, style.light)
    for number in range(frames):
        second = number / truth.fps
        picture = backdrop.copy()
        objects: list[StreetObject] = []
        present = [(place, actor) for actor in actors if (place := actor.place(second)) is not None]
        for place, actor in sorted(present, key=lambda pair: pair[0][1]):
            box = stage.draw(picture, actor, second)
            if box is not None:
                objects.append(StreetObject(actor.id, actor.kind, box, place[3] > 0))
        truth.frames.append(objects)
        yield picture


class _ActorPainter:
    """Pastes actors into frames."""

    def __init__(self, width: int, height: int, light: Light) -> None:
        self.width, self.height = width, height
        self.tint = np.asarray(light.tint, dtype=np.float32) * light.level
        self.lights = light.level < 0.9
        self._sprite = cache(self._make_sprite)

    def draw(self, picture: Picture, actor: StreetActor, second: float) -> tuple[int, int, int, int] | None:
        """Draw an actor; returns the visible part of its box, None outside the picture."""
        place = actor.place(second)
        if place is None:
            return None
        x, y, _, speed = place
        near = 0.72 + 0.75 * (y - 0.43)
        share = (_PERSON_HEIGHT if actor.kind == "person" else _CAR_HEIGHT) * near / 0.72
        # Sizes in steps of two pixels: few distinct sprites to cache.
        pixels = max(4, round(share * self.height / 2) * 2)
        walked = speed * second * self.width / self.height
        step = int(walked / (_STRIDE_PER_HEIGHT * share) * STEPS) % STEPS if speed > 0 else STEPS
        step = step if actor.kind == "person" else 0
        sprite = self._sprite(actor.look, pixels, step, actor.leftwards(second))
        left = round(x * self.width - sprite.rgb.shape[1] / 2)
        top = round(y * self.height) - sprite.rgb.shape[0]
        self._paste(picture, sprite, left, top)
        return self._clipped(sprite, left, top)

    def _make_sprite(self, look: object, pixels: int, step: int, leftwards: bool) -> Sprite:
        if isinstance(look, PersonLook):
            sprite = person(look, pixels, step, leftwards=leftwards)
        else:
            sprite = car(look, pixels, leftwards=leftwards, lights=self.lights)  # type: ignore[arg-type]
        lit = np.clip(sprite.rgb * self.tint, 0, 255).astype(np.int16)
        return Sprite(lit, sprite.alpha, sprite.box)

    def _paste(self, picture: Picture, sprite: Sprite, left: int, top: int) -> None:
        rows, cols = sprite.alpha.shape[:2]
        y0, y1 = max(0, top), min(self.height, top + rows)
        x0, x1 = max(0, left), min(self.width, left + cols)
        if y0 >= y1 or x0 >= x1:
            return
        window = (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))
        under = picture[y0:y1, x0:x1].astype(np.int32)
        over = (sprite.rgb[window] - under) * sprite.alpha[window]
        picture[y0:y1, x0:x1] = under + (over >> 8)

    def _clipped(self, sprite: Sprite, left: int, top: int) -> tuple[int, int, int, int] | None:
        x0, y0 = max(0, left + sprite.box[0]), max(0, top + sprite.box[1])
        x1, y1 = min(self.width, left + sprite.box[2]), min(self.height, top + sprite.box[3])
        return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None


class _Sensor:
    """Noise and flicker on the luma plane."""

    def __init__(self, style: ClipKind, width: int, height: int, fps: float, seed: int) -> None:
        self.style, self.width, self.height, self.fps = style, width, height, fps
        self._rng = np.random.default_rng([seed, 3])
        # One noise field, shifted in every frame: as cheap as an addition.
        shape = (height + _NOISE_FIELDS, width + _NOISE_FIELDS)
        self._field = np.rint(self._rng.normal(0.0, style.noise, shape)).astype(np.int16) if style.noise else None

    def add_noise(self, frame: VideoFrame, number: int) -> None:
        """Modify ``frame`` (yuv420p) in place."""
        if self._field is None:
            return
        # PyAV's stubs do not know that a plane is a buffer.
        plane: Any = frame.planes[0]
        luma = np.frombuffer(plane, dtype=np.uint8).reshape(self.height, plane.line_size)[:, : self.width]
        dy, dx = self._rng.integers(0, _NOISE_FIELDS, 2)
        noise = self._field[dy : dy + self.height, dx : dx + self.width]
        beat = math.sin(2 * math.pi * 2.3 * number / self.fps) + 0.5 * self._rng.standard_normal()
        levels = np.arange(256) * (1.0 + self.style.flicker * beat)
        table = np.clip(levels, 0, 255).astype(np.int16)
        luma[:] = np.clip(table[luma] + noise, 0, 255).astype(np.uint8)
