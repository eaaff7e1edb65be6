"""How a camera sees and encodes: light over time, sensor, codec."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cluster.lab.scenes.textures import Float
from cluster.lab.scenes.vocabulary import Split


@dataclass(frozen=True, slots=True)
class CameraSettings:
    """Size, rate and encoder. ``gop_s``: seconds between I-frames; ``crf``: constant quality of x264 or x265."""

    width: int
    height: int
    fps: float
    codec: str
    gop_s: float
    bframes: int
    crf: int


@dataclass(frozen=True, slots=True)
class Conditions:
    """Light, weather, sensor. ``noise`` in grey levels, ``flicker`` and ``drift`` as relative gain, ``rain`` 0..1."""

    light: str
    tint: tuple[float, float, float]
    level: float
    drift: float
    drift_s: float
    noise: float
    flicker: float
    rain: float
    monochrome: bool

    def gain(self, second: float, number: int) -> float:
        """Brightness at an instant, 1 in steady daylight."""
        drift = 1.0 + self.drift * math.sin(2 * math.pi * second / self.drift_s)
        beat = self.flicker * math.sin(2 * math.pi * 0.37 * number)
        return self.level * drift * (1.0 + beat)


# What a split's cameras may be set to. None of test's combinations is in the other list.
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


def draw_camera(split: Split, rng: np.random.Generator) -> CameraSettings:
    """One of the settings the split's cameras may have."""
    pool = _CAMERAS["test" if split == "test" else "train"]
    return pool[int(rng.integers(len(pool)))]


def draw_conditions(light: str, strata: frozenset[str], rng: np.random.Generator) -> Conditions:
    """Light, weather and sensor for a scene of these strata."""
    noisy = "noisy" in strata
    level = {"day": rng.uniform(0.85, 1.08), "dusk": rng.uniform(0.58, 0.72), "night": rng.uniform(0.4, 0.54)}[light]
    tint = {"day": (1.0, 1.0, 0.98), "dusk": (1.06, 0.95, 0.9), "night": (0.9, 0.97, 1.16)}[light]
    return Conditions(
        light=light,
        tint=tint,
        level=float(level),
        drift=float(rng.uniform(0.0, 0.06)),
        drift_s=float(rng.uniform(18, 60)),
        noise=float(rng.uniform(4.0, 6.5) if noisy else rng.uniform(0.3, 1.8)),
        flicker=float(rng.uniform(0.02, 0.05) if noisy else 0.0),
        rain=float(rng.uniform(0.5, 1.0) if "rain" in strata else 0.0),
        monochrome=bool(light == "night" and rng.random() < 0.5),
    )


class Sensor:
    """Turns light into the pixels of one camera: gain, tint, rain, noise."""

    def __init__(self, conditions: Conditions, width: int, height: int, seed: int) -> None:
        self._conditions = conditions
        self._seed = seed
        rng = np.random.default_rng([seed, 5])
        self._shape = (height, width)
        pad = 48
        # One field shown at another offset in each frame: noise at the price of an addition.
        self._noise = rng.normal(0.0, max(conditions.noise, 0.01), (height + pad, width + pad, 1)).astype(np.float32)
        if conditions.noise > 2.5:
            self._noise = self._noise + rng.normal(0.0, conditions.noise / 3, (height + pad, width + pad, 3)).astype(
                np.float32
            )
        self._pad = pad
        self._rain = self._streaks(rng) if conditions.rain else None

    def _streaks(self, rng: np.random.Generator) -> Float:
        """Slanted bright lines, twice as high as the picture, to be scrolled through it."""
        height, width = self._shape
        field = np.zeros((2 * height, width), dtype=np.float32)
        length = max(4, height // 14)
        for _ in range(round(90 * self._conditions.rain)):
            top, left = int(rng.integers(0, 2 * height - length)), int(rng.integers(0, width - length // 4 - 1))
            steps = np.arange(length)
            field[top + steps, left + steps // 5] = rng.uniform(18, 40)
        return field[..., None]

    def expose(self, picture: Float, second: float, number: int) -> np.ndarray:
        """``picture`` float32 in daylight -> uint8 as the sensor gives it. Changes ``picture``."""
        conditions = self._conditions
        rng = np.random.default_rng([self._seed, 6, number])
        if conditions.monochrome:
            picture[...] = picture.mean(axis=-1, keepdims=True)
            tint: np.ndarray = np.ones(3, dtype=np.float32)
        else:
            tint = np.asarray(conditions.tint, dtype=np.float32)
        picture *= tint * conditions.gain(second, number)
        if self._rain is not None:
            offset = int(rng.integers(0, self._shape[0]))
            picture += self._rain[offset : offset + self._shape[0]]
        dy, dx = rng.integers(0, self._pad, 2)
        picture += self._noise[dy : dy + self._shape[0], dx : dx + self._shape[1]]
        np.clip(picture, 0, 255, out=picture)
        return picture.astype(np.uint8)
