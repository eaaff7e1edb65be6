"""Static parts of a scene: facade, ground, road with markings, marked zone, foreground."""

from dataclasses import dataclass

import numpy as np

from cluster.lab.scenes.layouts import ASPECT, Layout
from cluster.lab.scenes.textures import Float, clouds, texture


@dataclass(frozen=True, slots=True)
class Foreground:
    """A layer between camera and scene: ``rgb [h, w, 3]``, ``alpha [h, w, 1]`` and its top left corner (px)."""

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
    # An arrow on each lane.
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
    """A swaying tree crown in an upper corner and a pole."""
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
    """The railing along the zone's front edge, None without one."""
    zone = layout.zone
    if not zone.fence:
        return None
    tall = 0.3 * layout.person_height(zone.y1)
    top, rows = round((zone.y1 - tall) * height), max(4, round(tall * height))
    left, cols = round(zone.x0 / ASPECT * width), max(8, round((zone.x1 - zone.x0) / ASPECT * width))
    y = np.linspace(0, 1, rows, dtype=np.float32)[:, None]
    x = (np.arange(cols, dtype=np.float32) / height)[None, :]
    rails = (np.abs(y - 0.1) < 0.09) | (np.abs(y - 0.55) < 0.07)
    posts = x / 0.1 % 1 < 0.14
    alpha = (rails | posts).astype(np.float32)[..., None]
    rgb = np.broadcast_to(np.array((196, 198, 200), dtype=np.float32), (rows, cols, 3)).copy()
    return Foreground(rgb, alpha, left, top, False)
