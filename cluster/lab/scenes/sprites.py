"""Sprites of people, vehicles and bags, drawn by Pillow with threefold oversampling."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from cluster.lab.scenes.layouts import Color
from cluster.lab.scenes.textures import Float

_OVERSAMPLE = 3
_SKINS: tuple[Color, ...] = ((226, 184, 154), (176, 124, 88), (112, 76, 54))
_TROUSERS: tuple[Color, ...] = ((44, 48, 66), (70, 66, 60), (30, 30, 34), (96, 92, 84))
_DARK: Color = (26, 26, 30)


@dataclass(frozen=True, slots=True)
class Pose:
    """Pose of a person, quantised so that sprites can be cached: ``step`` of the walking cycle (-1: standing), ``lean``
    in degrees from upright, ``crouch`` 0..1, ``arms`` in degrees from hanging down (forward is positive)."""

    step: int = -1
    lean: int = 0
    crouch: float = 0.0
    arms: tuple[int, int] = (8, -8)
    sit: bool = False
    bag: bool = False


@dataclass(frozen=True, slots=True)
class Sprite:
    """``rgb [h, w, 3]`` (0..255) and ``alpha [h, w, 1]`` (0..1), float32; ``foot``: pixel that touches the ground;
    ``box``: bounding box of the solid part (left, top, right, bottom), in sprite pixels."""

    rgb: Float
    alpha: Float
    foot: tuple[int, int]
    box: tuple[int, int, int, int]


STEPS = 12


class _Pen:
    """Canvas in units of the figure's height; origin at the foot point, y upwards, rotated by ``lean``."""

    def __init__(self, width: float, height: float, pixels: float, foot_y: float, lean: float = 0.0) -> None:
        self.scale = pixels * _OVERSAMPLE
        self.size = (max(3, math.ceil(width * pixels)) * _OVERSAMPLE, max(3, math.ceil(height * pixels)) * _OVERSAMPLE)
        self.foot = (self.size[0] / 2, self.size[1] - foot_y * self.scale)
        self.image = Image.new("RGBA", self.size, (0, 0, 0, 0))
        self.draw = ImageDraw.Draw(self.image)
        self.cos, self.sin = math.cos(math.radians(lean)), math.sin(math.radians(lean))

    def at(self, x: float, y: float) -> tuple[float, float]:
        turned = (x * self.cos + y * self.sin, y * self.cos - x * self.sin)
        return self.foot[0] + turned[0] * self.scale, self.foot[1] - turned[1] * self.scale

    def limb(self, points: list[tuple[float, float]], width: float, color: Color) -> None:
        spots = [self.at(*point) for point in points]
        pixels = max(1, round(width * self.scale))
        self.draw.line(spots, fill=color, width=pixels, joint="curve")
        for spot in (spots[0], spots[-1]):
            self.disc(spot, pixels / 2, color)

    def disc(self, spot: tuple[float, float], radius: float, color: Color) -> None:
        x, y = spot
        self.draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)

    def polygon(self, points: list[tuple[float, float]], color: Color) -> None:
        self.draw.polygon([self.at(*point) for point in points], fill=color)

    def sprite(self, mirrored: bool) -> Sprite:
        image = self.image.reduce(_OVERSAMPLE)
        if mirrored:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        data = np.asarray(image, dtype=np.float32)
        alpha = data[..., 3:] / 255
        # Downsampling against transparent black has premultiplied colours by alpha: undo that.
        rgb = np.divide(data[..., :3], np.maximum(alpha, 1e-3), out=np.zeros_like(data[..., :3]), where=alpha > 0)
        rows, cols = np.nonzero(alpha[..., 0] > 0.5)
        box = (0, 0, 1, 1)
        if len(rows):
            box = (int(cols.min()), int(rows.min()), int(cols.max()) + 1, int(rows.max()) + 1)
        foot_x = self.foot[0] / _OVERSAMPLE
        foot = (round(data.shape[1] - foot_x if mirrored else foot_x), round(self.foot[1] / _OVERSAMPLE))
        return Sprite(np.clip(rgb, 0, 255), alpha, foot, box)


@lru_cache(maxsize=512)
def person_sprite(color: Color, seed: int, pixels: float, pose: Pose, direction: int) -> Sprite:
    """A person ``pixels`` tall when upright, facing ``direction``."""
    skin, trousers = _SKINS[seed % len(_SKINS)], _TROUSERS[seed // 3 % len(_TROUSERS)]
    shade: Color = tuple(int(0.72 * part) for part in color)  # type: ignore[assignment]
    pen = _Pen(2.3, 1.25, pixels, 0.12, pose.lean)
    hip = 0.5 - 0.26 * pose.crouch - (0.2 if pose.sit else 0.0)
    bend = 0.10 * pose.crouch
    swing = 0.0 if pose.step < 0 else 0.19 * math.sin(2 * math.pi * pose.step / STEPS)
    for side, tone in ((-1, tuple(int(0.75 * part) for part in trousers)), (1, trousers)):
        foot_x = side * (swing if pose.step >= 0 else 0.05)
        knee = (0.06 + foot_x / 2 + 0.22 * pose.crouch, 0.26 - 0.04 * pose.crouch)
        if pose.sit:
            knee, foot_x = (0.24, 0.28), 0.26
        lift = 0.05 * max(0.0, math.cos(2 * math.pi * pose.step / STEPS) * side) if pose.step >= 0 else 0.0
        pen.limb([(0, hip), knee, (foot_x, 0.03 + lift)], 0.105, tone)  # type: ignore[arg-type]
        pen.limb([(foot_x, 0.025 + lift), (foot_x + 0.07, 0.025 + lift)], 0.05, _DARK)
    if pose.sit:
        pen.limb([(-0.06, 0.1), (0.06, 0.1)], 0.2, (92, 80, 66))
    shoulder = (bend + 0.12 * pose.crouch, hip + 0.33)
    arm_tones = ((pose.arms[1] if pose.step < 0 else round(-130 * swing), shade),
                 (pose.arms[0] if pose.step < 0 else round(130 * swing), color))  # fmt: skip
    _arm(pen, shoulder, *arm_tones[0], skin)
    pen.limb([(0, hip), shoulder], 0.2, color)
    _arm(pen, shoulder, *arm_tones[1], skin)
    head = (shoulder[0] + 0.02, shoulder[1] + 0.16)
    pen.disc(pen.at(*head), 0.075 * pen.scale, skin)
    pen.disc(pen.at(head[0] - 0.015, head[1] + 0.025), 0.065 * pen.scale, _TROUSERS[seed // 7 % 3])
    pen.disc(pen.at(head[0] + 0.03, head[1] - 0.015), 0.052 * pen.scale, skin)
    if pose.bag:
        pen.limb([(-0.02, 0.24), (0.1, 0.24)], 0.15, (92, 52, 30))
    return pen.sprite(direction < 0)


def _arm(pen: _Pen, shoulder: tuple[float, float], angle: int, color: Color, skin: Color) -> None:
    turn = math.radians(angle)
    elbow = (shoulder[0] + 0.17 * math.sin(turn), shoulder[1] - 0.17 * math.cos(turn))
    fore = turn + 0.35
    hand = (elbow[0] + 0.16 * math.sin(fore), elbow[1] - 0.16 * math.cos(fore))
    pen.limb([shoulder, elbow, hand], 0.068, color)
    pen.disc(pen.at(*hand), 0.038 * pen.scale, skin)


# Length and height, in units of a person's height.
VEHICLE_SIZES = {"car": (2.3, 0.82), "van": (2.6, 1.15), "bus": (3.7, 1.5)}


@lru_cache(maxsize=192)
def vehicle_sprite(color: Color, form: str, pixels: float, direction: int, turn: int, lights: bool) -> Sprite:
    """A vehicle from the side; ``pixels``: height of a person beside it; ``turn`` of its wheels in eighths."""
    length, height = VEHICLE_SIZES[form]
    pen = _Pen(length + 0.2, height + 0.2, pixels, 0.06)
    shade: Color = tuple(int(0.7 * part) for part in color)  # type: ignore[assignment]
    left, right = -length / 2, length / 2
    glass: Color = (58, 74, 88)
    if form == "car":
        roof = [(left + 0.42, 0.46), (left + 0.62, height), (right - 0.85, height), (right - 0.5, 0.46)]
        pen.polygon(roof, shade)
        pen.polygon([(left + 0.5, 0.48), (left + 0.66, height - 0.05), (-0.05, height - 0.05), (-0.05, 0.48)], glass)
        pen.polygon([(0.02, 0.48), (0.02, height - 0.05), (right - 0.88, height - 0.05), (right - 0.6, 0.48)], glass)
        pen.polygon([(left, 0.16), (left + 0.04, 0.48), (right - 0.42, 0.5), (right, 0.36), (right, 0.16)], color)
    else:
        pen.polygon([(left, 0.16), (left, height), (right - 0.2, height), (right, 0.62), (right, 0.16)], color)
        pen.polygon([(left, 0.16), (left, 0.3), (right, 0.3), (right, 0.16)], shade)
        panes = 1 if form == "van" else 5
        for pane in range(panes):
            x = right - 0.62 - 0.56 * pane
            pen.polygon([(x, 0.66), (x, height - 0.12), (x + 0.42, height - 0.12), (x + 0.5, 0.66)], glass)
    for x in (left + 0.45, right - 0.5):
        pen.disc(pen.at(x, 0.16), 0.18 * pen.scale, _DARK)
        pen.disc(pen.at(x, 0.16), 0.09 * pen.scale, (120, 120, 124))
        spoke = math.radians(45 * turn)
        pen.limb([(x, 0.16), (x + 0.1 * math.cos(spoke), 0.16 + 0.1 * math.sin(spoke))], 0.03, _DARK)
    lamp: Color = (255, 250, 214) if lights else (232, 226, 196)
    pen.disc(pen.at(right - 0.05, 0.33), 0.065 * pen.scale, lamp)
    pen.polygon([(left, 0.3), (left, 0.42), (left + 0.06, 0.42), (left + 0.06, 0.3)], (196, 30, 26))
    return pen.sprite(direction < 0)


@lru_cache(maxsize=64)
def bag_sprite(color: Color, form: str, pixels: float) -> Sprite:
    """A piece of luggage; ``pixels``: height of a person beside it."""
    pen = _Pen(0.6, 0.55, 1.35 * pixels, 0.04)
    shade: Color = tuple(int(0.65 * part) for part in color)  # type: ignore[assignment]
    if form == "sack":
        pen.limb([(-0.06, 0.13), (0.06, 0.13)], 0.26, color)
        pen.limb([(-0.05, 0.28), (0.05, 0.28)], 0.05, shade)
    else:
        half = 0.17 if form == "case" else 0.14
        top = 0.32 if form == "case" else 0.27
        pen.polygon([(-half, 0), (-half, top), (half, top), (half, 0)], color)
        pen.polygon([(-half, 0), (-half, 0.06), (half, 0.06), (half, 0)], shade)
        pen.limb([(-0.07, top), (-0.07, top + 0.07), (0.07, top + 0.07), (0.07, top)], 0.03, shade)
    return pen.sprite(False)
