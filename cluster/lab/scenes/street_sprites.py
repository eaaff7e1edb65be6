"""Backdrop and sprites of the street clips, drawn from signed distance functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Color = tuple[float, float, float]

# Vertical positions, in shares of the picture's height.
FACADE_END = 0.37
FAR_WALK = 0.435
FAR_LANE = 0.575
NEAR_LANE = 0.755
NEAR_WALK = 0.95
DOOR_X = 0.42


@dataclass(frozen=True, slots=True)
class Light:
    """``level``: brightness, ``tint``: colour, ``lamp``: strength of the street lamp, 0..1."""

    level: float
    tint: Color
    lamp: float


DAY = Light(1.0, (1.0, 1.0, 0.98), 0.0)
DUSK = Light(0.68, (1.06, 0.95, 0.9), 0.35)
NIGHT = Light(0.23, (0.88, 0.96, 1.2), 0.9)


def paint_street(width: int, height: int, light: Light, seed: int) -> npt.NDArray[np.uint8]:
    """``[height, width, 3]`` uint8, deterministic. ``seed`` varies textures, windows and colours."""
    rng = np.random.default_rng([seed, 1])
    y = ((np.arange(height, dtype=np.float32) + 0.5) / height)[:, None]
    x = ((np.arange(width, dtype=np.float32) + 0.5) / width)[None, :]
    picture = np.zeros((height, width, 3), dtype=np.float32)
    aspect = width / height

    def fill(where: npt.NDArray[np.bool_], color: Color, texture: Float | float = 0.0) -> None:
        tone = np.broadcast_to(np.asarray(texture, dtype=np.float32), (height, width))[where]
        picture[where] = np.asarray(color, dtype=np.float32) + tone[:, None]

    coarse, fine = _clouds(rng, height, width, 6), _clouds(rng, height, width, 90)
    grain = rng.normal(0.0, 1.0, (height, width)).astype(np.float32)
    everywhere = np.ones((height, width), dtype=np.bool_)

    wall: Color = [(150, 98, 80), (168, 150, 126), (132, 112, 104)][seed % 3]
    course = y / 0.016
    brick = x * aspect / 0.036 + (np.floor(course) % 2) / 2
    mortar = (course % 1 < 0.16) | (brick % 1 < 0.07)
    fill(everywhere & (y < FACADE_END), wall, 9 * coarse + 5 * grain)
    picture[mortar & (y < FACADE_END)] += 16
    for left in np.arange(0.035, 0.97, 0.125):
        door = abs(left + 0.04 - DOOR_X) < 0.07
        bottom = FACADE_END if door else 0.285
        frame = (x > left - 0.006) & (x < left + 0.081) & (y > 0.065) & (y < bottom)
        pane = (x > left) & (x < left + 0.075) & (y > 0.08) & (y < bottom - 0.012)
        fill(frame, (205, 200, 190), 2 * grain)
        glass = 26 * (y - 0.08) / 0.2 + 30 * ((x - left) * 8 + y * 3 % 1 > 0.75) + 10 * coarse
        lit = light.lamp > 0 and rng.random() < 0.3
        fill(pane, (86, 58, 40) if door else (230, 200, 120) if lit else (58, 74, 92), 4 * grain if door else glass)
        fill(pane & (abs(x - left - 0.0375) < 0.003), (190, 186, 178))
    fill(everywhere & (abs(y - 0.03) < 0.012), (96, 92, 90), 3 * grain)

    far = (y >= FACADE_END) & (y < 0.455)
    near = y >= 0.815
    slabs = ((x * aspect + 0.4 * y) / 0.085 % 1 < 0.035) | (abs(y - 0.41) < 0.0025) | (abs(y - 0.905) < 0.004)
    for pavement in (far & everywhere, near & everywhere):
        fill(pavement, (148, 144, 138), 10 * coarse + 5 * fine + 5 * grain)
        picture[pavement & slabs] -= 24
    fill(everywhere & (y >= 0.455) & (y < 0.472), (176, 172, 165), 4 * grain)
    fill(everywhere & (y >= 0.8) & (y < 0.815), (178, 174, 168), 4 * grain)
    road = everywhere & (y >= 0.472) & (y < 0.8)
    fill(road, (84, 85, 88), 8 * coarse + 6 * fine + 8 * grain)
    fill(road & (abs(y - 0.634) < 0.006) & (x * aspect / 0.22 % 1 < 0.55), (214, 212, 200), 10 * fine + 6 * grain)
    fill(road & (abs(y - 0.487) < 0.004), (196, 180, 96), 14 * fine)
    manhole = np.hypot((x - 0.27) * aspect, (y - 0.7) * 1.9)
    fill(road & (manhole < 0.035), (62, 60, 60), 5 * grain)
    picture[manhole.astype(np.float32) < 0.028] += 9

    picture *= (0.86 + 0.14 * np.clip((y - FACADE_END) / 0.1, 0, 1))[..., None]
    post = (abs(x - 0.86) < 0.0045) & (y > 0.05) & (y < 0.448)
    arm = (x > 0.8) & (x < 0.862) & (abs(y - 0.055) < 0.007)
    fill(post | arm, (62, 66, 66), 3 * grain)
    _plant_tree(picture, x * aspect, y, 0.655 * aspect, rng, fine, grain)

    picture *= light.level * np.asarray(light.tint, dtype=np.float32)
    cone = np.exp(-(((x - 0.8) * aspect / 0.34) ** 2 + ((y - 0.42) / 0.3) ** 2))
    bulb = np.exp(-(((x - 0.802) * aspect / 0.018) ** 2 + ((y - 0.062) / 0.018) ** 2))
    picture *= (1.0 + light.lamp * 3.0 * cone)[..., None]
    picture += (light.lamp * 235 * bulb)[..., None] * np.array((1.0, 0.92, 0.7), dtype=np.float32)
    vignette = 1.0 - 0.22 * (((x - 0.5) / 0.72) ** 2 + ((y - 0.5) / 0.72) ** 2)
    picture *= vignette[..., None]
    return np.clip(picture, 0, 255).astype(np.uint8)


def _plant_tree(
    picture: Float, x: Float, y: Float, foot: float, rng: np.random.Generator, fine: Float, grain: Float
) -> None:
    trunk = (np.abs(x - foot) < 0.013) & (y > 0.2) & (y < 0.445)
    picture[trunk] = np.array((82, 62, 44), dtype=np.float32) + 6 * grain[trunk][:, None]
    crown = np.full(fine.shape, -9.0, dtype=np.float32)
    for _ in range(26):
        angle, reach = rng.uniform(0, 2 * np.pi), 0.1 * np.sqrt(rng.random())
        cx, cy = foot + 1.25 * reach * np.cos(angle), 0.145 + reach * np.sin(angle)
        bump = 1.0 - (np.square(x - cx) + np.square(y - cy)) / rng.uniform(0.03, 0.05) ** 2
        crown = np.maximum(crown, bump)
    leaves = crown + np.clip(0.5 * fine, -0.4, 0.4) > 0.1
    tone = 18 * crown[leaves] + 16 * fine[leaves] + 9 * grain[leaves]
    picture[leaves] = np.array((52, 84, 40), dtype=np.float32) + tone[:, None]


def _clouds(rng: np.random.Generator, height: int, width: int, knots: int) -> Float:
    """Smooth noise with about ``knots`` bumps over the height, standard deviation about one."""
    rows, cols = knots + 1, knots * width // height + 2
    grid = rng.normal(0.0, 1.3, (rows, cols)).astype(np.float32)
    ys = np.linspace(0, rows - 1.001, height, dtype=np.float32)
    xs = np.linspace(0, cols - 1.001, width, dtype=np.float32)
    y0, x0 = ys.astype(np.intp), xs.astype(np.intp)
    fy, fx = (ys - y0)[:, None], (xs - x0)[None, :]
    upper = grid[y0][:, x0] * (1 - fx) + grid[y0][:, x0 + 1] * fx
    lower = grid[y0 + 1][:, x0] * (1 - fx) + grid[y0 + 1][:, x0 + 1] * fx
    smooth: Float = upper * (1 - fy) + lower * fy
    return smooth


# mypy cannot tell the precision of arithmetic with Python numbers.
Float = npt.NDArray[np.floating]
PixelColor = tuple[int, int, int]

STEPS = 8
"""Sprites of one walking cycle."""

_OVERSAMPLING = 3
_SHADOW: PixelColor = (12, 12, 18)
_GLASS: PixelColor = (52, 66, 80)
_TYRE: PixelColor = (24, 24, 26)


@dataclass(frozen=True, slots=True)
class Sprite:
    """``rgb`` ``[h, w, 3]`` and ``alpha`` ``[h, w, 1]`` (0..256), both int16.

    ``box``: the solid object without its shadow (left, top, right, bottom; right and bottom exclusive) in sprite
    pixels. The sprite stands on the middle of its bottom edge.
    """

    rgb: npt.NDArray[np.int16]
    alpha: npt.NDArray[np.int16]
    box: tuple[int, int, int, int]


class _Canvas:
    """Canvas in units of the sprite's height with threefold oversampling."""

    def __init__(self, width: float, height: float, pixels: int) -> None:
        self.scale = pixels * _OVERSAMPLING / height
        rows = pixels * _OVERSAMPLING
        cols = max(1, round(width * self.scale / _OVERSAMPLING)) * _OVERSAMPLING
        self.y = ((np.arange(rows, dtype=np.float32) + 0.5) / self.scale)[:, None]
        self.x = ((np.arange(cols, dtype=np.float32) + 0.5) / self.scale)[None, :]
        self.rgb = np.zeros((rows, cols, 3), dtype=np.float32)
        self.alpha = np.zeros((rows, cols), dtype=np.float32)
        self.solid = np.zeros((rows, cols), dtype=np.bool_)

    def paint(self, distance: Float, color: PixelColor, *, opacity: float = 1.0, light: float = 0.0) -> None:
        """Fill where ``distance`` < 0, antialiased; ``light`` brightens towards the top."""
        cover = np.clip(0.5 - distance * self.scale, 0.0, 1.0) * opacity
        shade = 1.0 + light * (0.5 - self.y / float(self.y[-1, 0]))
        tint = np.asarray(color, dtype=np.float32) * shade[..., None]
        self.rgb += cover[..., None] * (tint - self.rgb)
        self.alpha = cover + self.alpha * (1.0 - cover)
        if opacity == 1.0:
            self.solid |= cover > 0.5

    def ellipse(self, x: float, y: float, rx: float, ry: float) -> Float:
        distance: Float = (np.hypot((self.x - x) / rx, (self.y - y) / ry) - 1.0) * min(rx, ry)
        return distance

    def capsule(self, x0: float, y0: float, x1: float, y1: float, radius: float) -> Float:
        dx, dy = x1 - x0, y1 - y0
        along = np.clip(((self.x - x0) * dx + (self.y - y0) * dy) / (dx * dx + dy * dy), 0.0, 1.0)
        distance: Float = np.hypot(self.x - x0 - along * dx, self.y - y0 - along * dy) - radius
        return distance

    def box(self, x0: float, y0: float, x1: float, y1: float, radius: float) -> Float:
        qx: Float = np.abs(self.x - (x0 + x1) / 2) - (x1 - x0) / 2 + radius
        qy: Float = np.abs(self.y - (y0 + y1) / 2) - (y1 - y0) / 2 + radius
        outside: Float = np.hypot(np.maximum(qx, 0), np.maximum(qy, 0))
        distance: Float = outside + np.minimum(np.maximum(qx, qy), 0) - radius
        return distance

    def trapezoid(self, y0: float, y1: float, top: tuple[float, float], bottom: tuple[float, float]) -> Float:
        """From ``y0`` to ``y1``, with (left, right) edges from ``top`` to ``bottom``."""
        down = (self.y - y0) / (y1 - y0)
        left = top[0] + (bottom[0] - top[0]) * down
        right = top[1] + (bottom[1] - top[1]) * down
        sides = np.maximum(left - self.x, self.x - right)
        distance: Float = np.maximum(sides, np.maximum(y0 - self.y, self.y - y1))
        return distance

    def sprite(self, *, mirrored: bool) -> Sprite:
        rows, cols = (side // _OVERSAMPLING for side in self.alpha.shape)
        shape = (rows, _OVERSAMPLING, cols, _OVERSAMPLING)
        alpha = self.alpha.reshape(shape).mean(axis=(1, 3))
        weighted = (self.rgb * self.alpha[..., None]).reshape(*shape, 3).mean(axis=(1, 3))
        rgb = weighted / np.maximum(alpha, 1e-3)[..., None]
        solid = np.logical_or.reduce(self.solid.reshape(shape), axis=(1, 3))
        if mirrored:
            rgb, alpha, solid = rgb[:, ::-1], alpha[:, ::-1], solid[:, ::-1]
        ys, xs = np.nonzero(solid)
        box = (int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1)
        pixels = np.clip(rgb, 0, 255).astype(np.int16)
        return Sprite(np.ascontiguousarray(pixels), (alpha * 256).astype(np.int16)[..., None].copy(), box)


@dataclass(frozen=True, slots=True)
class PersonLook:
    """Colours of a person."""

    coat: PixelColor
    trousers: PixelColor
    hair: PixelColor
    skin: PixelColor


def person(look: PersonLook, pixels: int, step: int, *, leftwards: bool) -> Sprite:
    """A person ``pixels`` high at ``step`` of the walking cycle (``STEPS``: standing), from the side."""
    canvas = _Canvas(0.62, 1.0, pixels)
    swing = 0.0 if step >= STEPS else math.sin(2 * math.pi * step / STEPS)
    lift = 0.0 if step >= STEPS else 0.012 * abs(math.cos(2 * math.pi * step / STEPS))
    middle, hip, shoulder = 0.31, 0.53 - lift, 0.24 - lift
    canvas.paint(canvas.ellipse(middle + 0.03, 0.955, 0.26, 0.035), _SHADOW, opacity=0.45)
    dark: PixelColor = tuple(int(part * 0.75) for part in look.trousers)  # type: ignore[assignment]
    sleeve: PixelColor = tuple(int(part * 0.8) for part in look.coat)  # type: ignore[assignment]
    for side, trousers in ((-1.0, dark), (1.0, look.trousers)):
        angle = 0.42 * swing * side + 0.03 * side
        knee = (middle + math.sin(angle) * 0.21, hip + math.cos(angle) * 0.21)
        bend = angle - max(0.0, -0.5 * swing * side)
        foot = (knee[0] + math.sin(bend) * 0.2, knee[1] + math.cos(bend) * 0.2)
        canvas.paint(canvas.capsule(middle, hip, *knee, 0.052), trousers)
        canvas.paint(canvas.capsule(*knee, *foot, 0.042), trousers)
        canvas.paint(canvas.capsule(foot[0], foot[1] + 0.015, foot[0] + 0.055, foot[1] + 0.02, 0.026), (30, 26, 24))
    arm = -0.5 * swing
    canvas.paint(_limb(canvas, middle, shoulder, -arm), sleeve)
    canvas.paint(canvas.box(middle - 0.095, shoulder - 0.05, middle + 0.095, hip + 0.04, 0.07), look.coat, light=0.5)
    canvas.paint(_limb(canvas, middle, shoulder, arm), sleeve, light=0.3)
    canvas.paint(canvas.ellipse(middle + 0.012, 0.1 - lift, 0.07, 0.085), look.skin)
    canvas.paint(canvas.ellipse(middle - 0.022, 0.068 - lift, 0.072, 0.056), look.hair)
    return canvas.sprite(mirrored=leftwards)


def _limb(canvas: _Canvas, x: float, y: float, angle: float) -> Float:
    return canvas.capsule(x, y + 0.03, x + math.sin(angle) * 0.27, y + 0.03 + math.cos(angle) * 0.27, 0.037)


def car(paint: PixelColor, pixels: int, *, leftwards: bool, lights: bool) -> Sprite:
    """A car ``pixels`` high (2.7 times as long), from the side."""
    canvas = _Canvas(2.7, 1.0, pixels)
    canvas.paint(canvas.ellipse(1.35, 0.93, 1.3, 0.075), _SHADOW, opacity=0.55)
    lower: PixelColor = tuple(int(part * 0.72) for part in paint)  # type: ignore[assignment]
    canvas.paint(canvas.trapezoid(0.08, 0.46, (0.78, 1.72), (0.48, 2.16)), paint, light=0.4)
    canvas.paint(canvas.box(0.1, 0.4, 2.62, 0.84, 0.14), paint, light=0.7)
    canvas.paint(canvas.box(0.12, 0.68, 2.6, 0.85, 0.08), lower)
    canvas.paint(canvas.trapezoid(0.14, 0.42, (0.84, 1.2), (0.64, 1.2)), _GLASS, light=1.2)
    canvas.paint(canvas.trapezoid(0.14, 0.42, (1.27, 1.67), (1.27, 2.0)), _GLASS, light=1.2)
    canvas.paint(canvas.box(1.22, 0.44, 1.24, 0.76, 0.005), lower)
    canvas.paint(canvas.box(1.0, 0.5, 1.14, 0.53, 0.01), lower)
    for wheel in (0.58, 2.12):
        canvas.paint(canvas.ellipse(wheel, 0.82, 0.185, 0.165), _TYRE)
        canvas.paint(canvas.ellipse(wheel, 0.82, 0.1, 0.09), (138, 140, 146))
        canvas.paint(canvas.ellipse(wheel, 0.82, 0.035, 0.03), (60, 60, 64))
    canvas.paint(canvas.ellipse(2.53, 0.53, 0.07, 0.055), (255, 250, 215) if lights else (225, 225, 215))
    canvas.paint(canvas.ellipse(0.15, 0.54, 0.05, 0.07), (235, 40, 32) if lights else (150, 30, 28))
    return canvas.sprite(mirrored=leftwards)
