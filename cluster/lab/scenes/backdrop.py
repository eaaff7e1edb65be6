"""What does not move: facade, ground, road with its markings, the marked zone; and what stands in front of it all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cluster.lab.scenes.places import ASPECT, Layout

# Pictures are float32; coordinates mix with Python numbers, whose precision numpy types do not follow.
Float = npt.NDArray[np.floating]

_BASE = {
    "asphalt": (92, 93, 96),
    "concrete": (150, 147, 140),
    "gravel": (134, 122, 106),
    "slabs": (158, 154, 146),
    "grass": (96, 122, 66),
    "brick": (150, 96, 78),
    "plaster": (186, 172, 148),
    "sheet": (120, 132, 142),
    "worn": (110, 106, 104),
    "cobble": (126, 124, 126),
    "tiles": (168, 148, 132),
    "panel": (160, 168, 170),
    "hedge": (70, 98, 58),
}
DRAWN = "drawn"
"""Name of the surface that is another one for each seed."""
MIXED = "mixed"
"""The same from a wider range: stained, speckled, slatted, in patches, and two patterns at once."""

# Roughness: amplitude of coarse, fine and grain noise in grey levels.
_ROUGH = {
    "grass": (8, 12, 10),
    "gravel": (5, 10, 12),
    "hedge": (10, 16, 8),
    "asphalt": (6, 5, 6),
    "worn": (12, 6, 6),
    "cobble": (5, 5, 5),
}


def clouds(rng: np.random.Generator, height: int, width: int, knots: int) -> Float:
    """Smooth noise of about unit deviation with ``knots`` bumps over the height."""
    cols = max(2, round(knots * width / height))
    grid = rng.normal(0.0, 1.3, (knots + 1, cols + 1)).astype(np.float32)
    return np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)


def texture(name: str, height: int, width: int, seed: int) -> Float:
    """``[height, width, 3]`` float32 of a surface that fills a picture of that size; lengths follow its height."""
    y = ((np.arange(height, dtype=np.float32) + 0.5) / height)[:, None]
    x = ((np.arange(width, dtype=np.float32) + 0.5) / height)[None, :]
    if name == DRAWN:
        return _drawn(np.random.default_rng([seed, len(_BASE)]), x, y)
    if name == MIXED:
        return _mixed(np.random.default_rng([seed, len(_BASE) + 1]), x, y)
    rng = np.random.default_rng([seed, sorted(_BASE).index(name)])
    base = np.asarray(_BASE[name], dtype=np.float32) * rng.uniform(0.88, 1.1) + rng.uniform(-8, 8, 3).astype(np.float32)
    coarse, fine, grain = _ROUGH.get(name, (6, 4, 3))
    tone = coarse * clouds(rng, height, width, 5) + fine * clouds(rng, height, width, 40)
    tone = tone + grain * clouds(rng, height, width, 110)
    tone = tone + _pattern(name, x, y)
    picture: Float = base + tone[..., None]
    return picture


def _drawn(rng: np.random.Generator, x: Float, y: Float) -> Float:
    """A surface nobody named: colour, roughness and pattern are drawn."""
    height, width = y.shape[0], x.shape[1]
    grey = rng.uniform(70, 190)
    base = np.asarray(grey + rng.uniform(-28, 28, 3), dtype=np.float32)
    coarse, fine, grain = rng.uniform(2, 11), rng.uniform(2, 14), rng.uniform(1, 11)
    tone = coarse * clouds(rng, height, width, int(rng.integers(3, 9)))
    tone = tone + fine * clouds(rng, height, width, int(rng.integers(20, 60)))
    tone = tone + grain * clouds(rng, height, width, 110)
    turned = float(rng.uniform(-0.3, 0.3))
    along, across = x + turned * y, y - turned * x
    pitch, high, strong = (float(rng.uniform(*bounds)) for bounds in ((0.04, 0.2), (0.03, 0.14), (-24, 24)))
    joint = float(rng.uniform(0.03, 0.16))
    match int(rng.integers(4)):
        case 0:
            tone = tone + np.where((along / pitch % 1 < joint) | (across / high % 1 < joint), strong, 0.0)
        case 1:
            shifted = along / pitch + np.floor(across / high) % 2 * rng.uniform(0.2, 0.8)
            tone = tone + np.where((shifted % 1 < joint / 2) | (across / high % 1 < joint), strong, 0.0)
        case 2:
            tone = tone + strong / 2 * np.sin(2 * np.pi * (along if rng.random() < 0.5 else across) / high)
        case _:
            pass
    picture: Float = base + tone[..., None]
    return picture


def _mixed(rng: np.random.Generator, x: Float, y: Float) -> Float:
    """A surface of the widest range: two drawn ones side by side in patches, or one under stains and speckles."""
    height, width = y.shape[0], x.shape[1]
    picture = _drawn(rng, x, y)
    if rng.random() < 0.3:
        other = _drawn(rng, x, y)
        patches = clouds(rng, height, width, int(rng.integers(2, 14))) > rng.uniform(-0.5, 1.0)
        picture = np.where(patches[..., None], other, picture)
    picture = picture + rng.uniform(-26, 26) + rng.uniform(-14, 14, 3).astype(np.float32)
    if rng.random() < 0.5:
        stains = np.clip(clouds(rng, height, width, int(rng.integers(3, 16))) - rng.uniform(0.0, 1.2), 0, 1)
        picture = picture + (rng.uniform(-38, 38) * stains)[..., None]
    if rng.random() < 0.4:
        speckles = clouds(rng, height, width, int(rng.integers(16, 90))) > rng.uniform(1.2, 2.2)
        picture = picture + np.where(speckles, rng.uniform(-40, 40), 0.0)[..., None]
    if rng.random() < 0.3:
        turned = float(rng.uniform(-1.5, 1.5))
        slats = (x + turned * y) / rng.uniform(0.03, 0.3) % 1
        picture = picture + (rng.uniform(-22, 22) * (slats if rng.random() < 0.5 else slats > 0.5))[..., None]
    mixed: Float = picture.astype(np.float32)
    return mixed


def _pattern(name: str, x: Float, y: Float) -> Any:
    match name:
        case "brick":
            course = y / 0.03
            return np.where((course % 1 < 0.14) | ((x / 0.075 + np.floor(course) % 2 / 2) % 1 < 0.07), 18.0, 0.0)
        case "slabs":
            return np.where(((x + 0.3 * y) / 0.13 % 1 < 0.04) | (y / 0.08 % 1 < 0.06), -20.0, 0.0)
        case "tiles":
            return np.where(((x - 0.2 * y) / 0.09 % 1 < 0.06) | (y / 0.09 % 1 < 0.06), 16.0, 0.0)
        case "cobble":
            row = y / 0.025
            return 9.0 * np.sin(2 * np.pi * (x / 0.035 + np.floor(row) % 2 / 2)) * np.sin(np.pi * (row % 1))
        case "sheet":
            return 8.0 * np.sin(2 * np.pi * x / 0.045)
        case "panel":
            return np.where((x / 0.33 % 1 < 0.02) | (y / 0.14 % 1 < 0.03), -26.0, 0.0)
        case _:
            return 0.0


@dataclass(frozen=True, slots=True)
class Foreground:
    """Something between camera and scene: ``rgb [h, w, 3]``, ``alpha [h, w, 1]`` and where its corner lies (px)."""

    rgb: Float
    alpha: Float
    left: int
    top: int
    sways: bool


def paint_backdrop(layout: Layout, width: int, height: int) -> Float:
    """``[height, width, 3]`` float32 in 0..255, in daylight."""
    rng = np.random.default_rng([layout.seed, 7])
    y = ((np.arange(height, dtype=np.float32) + 0.5) / height)[:, None]
    x = ((np.arange(width, dtype=np.float32) + 0.5) / width * ASPECT)[None, :]
    road, ground, facade = (texture(name, height, width, layout.seed) for name in layout.textures)
    picture = np.where((y < layout.horizon)[..., None], facade, ground)
    _windows(picture, layout, x, y, rng)
    middle = layout.road + layout.slope * (x - ASPECT / 2)
    half = layout.lane + layout.median / 2
    on_road = (np.abs(y - middle) < half) & (y > layout.horizon)
    picture = np.where(on_road[..., None], road, picture)
    kerb = (np.abs(np.abs(y - middle) - half) < 0.008) & (y > layout.horizon)
    picture[kerb] = (186, 182, 174)
    _markings(picture, layout, x, y, middle)
    _zone(picture, layout, x, y)
    picture *= (1.0 - 0.16 * (((x / ASPECT - 0.5) / 0.7) ** 2 + ((y - 0.5) / 0.7) ** 2))[..., None]
    return picture.astype(np.float32)


def _windows(picture: Float, layout: Layout, x: Float, y: Float, rng: np.random.Generator) -> None:
    pitch, top = float(rng.uniform(0.16, 0.3)), float(rng.uniform(0.02, 0.06))
    bottom = layout.horizon * float(rng.uniform(0.6, 0.75))
    share = x / pitch % 1
    glass = (share > 0.2) & (share < 0.7) & (y > top) & (y < bottom)
    frame = (share > 0.16) & (share < 0.74) & (y > top - 0.01) & (y < bottom + 0.012)
    picture[frame & ~glass] = rng.uniform(150, 215)
    shine = 60 + 40 * ((x / pitch + 2 * y) % 1)
    picture[glass] = (shine + 0 * y)[glass][:, None] * np.array((0.8, 0.95, 1.1), dtype=np.float32)


def _markings(picture: Float, layout: Layout, x: Float, y: Float, middle: Float) -> None:
    white = np.array((222, 220, 208), dtype=np.float32)
    if layout.median > 0:
        strip = np.abs(y - middle) < layout.median / 2
        picture[strip & (y > layout.horizon)] = (112, 128, 84)
    else:
        dashes = (np.abs(y - middle) < 0.007) & (x / 0.2 % 1 < 0.55)
        picture[dashes] = white
    # An arrow on each lane: a shaft, and a head that narrows in the direction of travel.
    for near, sign in ((True, 1.0), (False, -1.0)):
        centre = middle + (0.5 * layout.lane + layout.median / 2) * (1 if near else -1)
        for at in (0.45, 1.3):
            along, across = (x - at) * sign, np.abs(y - centre) / layout.lane
            shaft = (np.abs(along) < 0.09) & (across < 0.06)
            head = (along > 0.05) & (across < 0.2 * (1 - (along - 0.05) / 0.1))
            picture[shaft | head] = white


def _zone(picture: Float, layout: Layout, x: Float, y: Float) -> None:
    zone = layout.zone
    inside = (x >= zone.x0) & (x <= zone.x1) & (y >= zone.y0) & (y <= zone.y1)
    edge = inside & ~((x >= zone.x0 + 0.014) & (x <= zone.x1 - 0.014) & (y >= zone.y0 + 0.012) & (y <= zone.y1 - 0.012))
    stripes = inside & ((x + zone.tilt * y) / zone.pitch % 1 < zone.share)
    color = np.asarray(zone.color, dtype=np.float32)
    picture[stripes] = (1 - zone.opaque) * picture[stripes] + zone.opaque * color
    picture[edge] = color


def paint_foreground(layout: Layout, width: int, height: int, *, tree: bool, pole: bool) -> list[Foreground]:
    """A swaying crown in an upper corner and a pole, as the seed places them."""
    rng = np.random.default_rng([layout.seed, 11])
    found = []
    at, side = float(rng.uniform(0.25, 0.75)), bool(rng.random() < 0.5)
    if pole:
        thick = max(2, round(0.02 * height))
        tone = np.linspace(60, 104, thick, dtype=np.float32)[None, :, None]
        rows = round(0.8 * height)
        rgb = np.broadcast_to(tone, (rows, thick, 3)).astype(np.float32)
        found.append(Foreground(rgb, np.ones((rows, thick, 1), np.float32), round(at * width), 0, False))
    if tree:
        rows, cols = round(0.42 * height), round(0.5 * height)
        y = np.linspace(0, 1, rows, dtype=np.float32)[:, None]
        x = np.linspace(0, 1, cols, dtype=np.float32)[None, :]
        x = x if side else 1 - x
        crown = 1.0 - np.hypot(x / 0.9, y / 0.9) + 0.16 * clouds(rng, rows, cols, 7)
        alpha = np.clip(crown * 14, 0, 1)[..., None].astype(np.float32)
        shade = 10 * clouds(rng, rows, cols, 9) + 9 * clouds(rng, rows, cols, 24)
        leaves = np.array((62, 92, 48), dtype=np.float32) + shade[..., None]
        found.append(Foreground(leaves.astype(np.float32), alpha, 0 if side else width - cols, 0, True))
    return found


def paint_fence(layout: Layout, width: int, height: int) -> Foreground | None:
    """The railing along the zone's front edge."""
    zone = layout.zone
    if not zone.fence:
        return None
    tall = 0.3 * layout.size(zone.y1)
    top, rows = round((zone.y1 - tall) * height), max(4, round(tall * height))
    left, cols = round(zone.x0 / ASPECT * width), max(8, round((zone.x1 - zone.x0) / ASPECT * width))
    y = np.linspace(0, 1, rows, dtype=np.float32)[:, None]
    x = (np.arange(cols, dtype=np.float32) / height)[None, :]
    rails = (np.abs(y - 0.1) < 0.09) | (np.abs(y - 0.55) < 0.07)
    posts = x / 0.1 % 1 < 0.14
    alpha = (rails | posts).astype(np.float32)[..., None]
    rgb = np.broadcast_to(np.array((196, 198, 200), dtype=np.float32), (rows, cols, 3)).copy()
    return Foreground(rgb, alpha, left, top, False)
