"""The street nothing moves in: facade, pavements, road, a tree and a lamp, painted once per clip."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.floating]
Color = tuple[float, float, float]

# Where things stand, as shares of the picture's height.
FACADE_END = 0.37
FAR_WALK = 0.435
FAR_LANE = 0.575
NEAR_LANE = 0.755
NEAR_WALK = 0.95
DOOR_X = 0.42


@dataclass(frozen=True, slots=True)
class Light:
    """``level`` scales everything, ``tint`` its colour; ``lamp`` is the strength of the street lamp's glow, 0..1."""

    level: float
    tint: Color
    lamp: float


DAY = Light(1.0, (1.0, 1.0, 0.98), 0.0)
DUSK = Light(0.68, (1.06, 0.95, 0.9), 0.35)
NIGHT = Light(0.23, (0.88, 0.96, 1.2), 0.9)


def paint_street(width: int, height: int, light: Light, seed: int) -> npt.NDArray[np.uint8]:
    """``[height, width, 3]`` uint8, the same for the same arguments. ``seed`` varies textures, windows and colours."""
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
    """Smooth noise with about ``knots`` bumps over the picture's height, standard deviation about one."""
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
