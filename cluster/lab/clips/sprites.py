"""People and cars drawn from signed distances: small pictures with transparency, made once and pasted every frame."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Coordinates mix with Python numbers, whose precision numpy's types do not follow.
Float = npt.NDArray[np.floating]
Color = tuple[int, int, int]

STEPS = 8
"""Pictures of one walking cycle; the last one stands still."""

_OVERSAMPLING = 3
_SHADOW: Color = (12, 12, 18)
_GLASS: Color = (52, 66, 80)
_TYRE: Color = (24, 24, 26)


@dataclass(frozen=True, slots=True)
class Sprite:
    """``rgb`` ``[h, w, 3]`` and ``alpha`` ``[h, w, 1]`` (0..256), both int16.

    ``box`` is the solid object without its shadow, ``(left, top, right, bottom)`` in sprite pixels, right and bottom
    exclusive. The sprite stands on the middle of its bottom edge.
    """

    rgb: npt.NDArray[np.int16]
    alpha: npt.NDArray[np.int16]
    box: tuple[int, int, int, int]


class _Canvas:
    """Shapes in units of the sprite's height, painted over each other at three times its resolution."""

    def __init__(self, width: float, height: float, pixels: int) -> None:
        self.scale = pixels * _OVERSAMPLING / height
        rows = pixels * _OVERSAMPLING
        cols = max(1, round(width * self.scale / _OVERSAMPLING)) * _OVERSAMPLING
        self.y = ((np.arange(rows, dtype=np.float32) + 0.5) / self.scale)[:, None]
        self.x = ((np.arange(cols, dtype=np.float32) + 0.5) / self.scale)[None, :]
        self.rgb = np.zeros((rows, cols, 3), dtype=np.float32)
        self.alpha = np.zeros((rows, cols), dtype=np.float32)
        self.solid = np.zeros((rows, cols), dtype=np.bool_)

    def paint(self, distance: Float, color: Color, *, opacity: float = 1.0, light: float = 0.0) -> None:
        """Fill where ``distance`` < 0 (soft by one fine pixel); ``light`` brightens towards the top of the shape."""
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
        """Between ``y0`` and ``y1``, its sides running from ``top`` to ``bottom`` (left, right)."""
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
    """Colours of one person."""

    coat: Color
    trousers: Color
    hair: Color
    skin: Color


def person(look: PersonLook, pixels: int, step: int, *, leftwards: bool) -> Sprite:
    """One person of ``pixels`` height at ``step`` of the walk (``STEPS`` = standing), seen from the side."""
    canvas = _Canvas(0.62, 1.0, pixels)
    swing = 0.0 if step >= STEPS else math.sin(2 * math.pi * step / STEPS)
    lift = 0.0 if step >= STEPS else 0.012 * abs(math.cos(2 * math.pi * step / STEPS))
    middle, hip, shoulder = 0.31, 0.53 - lift, 0.24 - lift
    canvas.paint(canvas.ellipse(middle + 0.03, 0.955, 0.26, 0.035), _SHADOW, opacity=0.45)
    dark: Color = tuple(int(part * 0.75) for part in look.trousers)  # type: ignore[assignment]
    sleeve: Color = tuple(int(part * 0.8) for part in look.coat)  # type: ignore[assignment]
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


def car(paint: Color, pixels: int, *, leftwards: bool, lights: bool) -> Sprite:
    """One car of ``pixels`` height (2.7 times as long), seen from the side."""
    canvas = _Canvas(2.7, 1.0, pixels)
    canvas.paint(canvas.ellipse(1.35, 0.93, 1.3, 0.075), _SHADOW, opacity=0.55)
    lower: Color = tuple(int(part * 0.72) for part in paint)  # type: ignore[assignment]
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
