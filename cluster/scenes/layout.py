"""Where the ground of a scene is road, pavement or forbidden, and how large things are at each place.

Coordinates are in picture heights: x runs from 0 to ``ASPECT``, y from 0 (top) to 1 (bottom).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.scenes.vocabulary import Split

ASPECT = 16 / 9
Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Zone:
    """A marked area nobody may enter: a parallelogram on the ground, ``fence``: with a low railing in front of it."""

    x0: float
    x1: float
    y0: float
    y1: float
    color: Color
    fence: bool

    def inside(self, x: float, y: float) -> bool:
        return self.x0 <= x <= self.x1 and self.y0 <= y <= self.y1


@dataclass(frozen=True, slots=True)
class Layout:
    """A camera's fixed view.

    Traffic keeps right: on the lane near the camera it runs to the right, on the far lane to the left. ``road`` is the
    y of the middle line at x = 0, ``slope`` its rise per unit of x, ``lane`` the height of a lane, ``median`` the
    height of a strip between the lanes.
    """

    name: str
    horizon: float
    road: float
    slope: float
    lane: float
    median: float
    body: float
    zone: Zone
    textures: tuple[str, str, str]
    seed: int

    def middle(self, x: float) -> float:
        """y of the road's middle line."""
        return self.road + self.slope * (x - ASPECT / 2)

    def lane_y(self, near: bool, x: float) -> float:
        """Where a vehicle's wheels stand on a lane."""
        offset = 0.82 * self.lane + self.median / 2 if near else -0.18 * self.lane - self.median / 2
        return self.middle(x) + offset

    def road_top(self, x: float) -> float:
        return self.middle(x) - self.lane - self.median / 2

    def road_bottom(self, x: float) -> float:
        return self.middle(x) + self.lane + self.median / 2

    def size(self, y: float) -> float:
        """Height of a grown person whose feet stand at ``y``."""
        return self.body * (0.55 + 0.75 * y)

    def walks(self) -> list[tuple[float, float]]:
        """Bands of y on which people walk: above and below the road, where there is room."""
        bands = []
        far = (max(self.horizon + 0.05, 0.25), min(self.road_top(0), self.road_top(ASPECT)) - 0.02)
        near = (max(self.road_bottom(0), self.road_bottom(ASPECT)) + 0.05, 0.97)
        for low, high in (far, near):
            if high - low > 0.05:
                bands.append((low, high))
        return bands


_Pools = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
# Half of them are drawn anew for each scene: who has seen ten surfaces only takes every other one for an object.
_TRAIN_TEXTURES: _Pools = (
    ("asphalt", "concrete", "gravel", *("drawn",) * 3),
    ("slabs", "concrete", "grass", "gravel", *("drawn",) * 4),
    ("brick", "plaster", "sheet", *("drawn",) * 3),
)
_TEST_TEXTURES: _Pools = (("worn", "cobble"), ("tiles", "cobble"), ("panel", "hedge"))
_ZONE_COLORS: tuple[Color, ...] = ((214, 180, 40), (200, 60, 48), (222, 130, 40))


def make_layout(split: Split, rng: np.random.Generator) -> Layout:
    """Draw a view. Training and validation draw streets, avenues and yards; test lots and boulevards, whose geometry
    and textures the others never have."""
    body = float(rng.uniform(0.32, 0.44))
    if split == "test":
        name = str(rng.choice(["lot", "boulevard"]))
        if name == "lot":
            horizon, road, slope = rng.uniform(0.16, 0.24), rng.uniform(0.75, 0.79), rng.uniform(-0.02, 0.02)
            lane, median = rng.uniform(0.12, 0.15), 0.0
        else:
            horizon, road, slope = rng.uniform(0.2, 0.28), rng.uniform(0.56, 0.62), rng.uniform(-0.1, -0.075)
            lane, median = rng.uniform(0.11, 0.13), rng.uniform(0.025, 0.04)
        pools = _TEST_TEXTURES
    else:
        name = str(rng.choice(["street", "avenue", "yard"]))
        horizon = rng.uniform(0.18, 0.3)
        if name == "street":
            road, slope = rng.uniform(0.47, 0.72), rng.uniform(-0.03, 0.03)
        elif name == "avenue":
            road, slope = rng.uniform(0.5, 0.68), float(rng.choice([-1, 1])) * rng.uniform(0.03, 0.07)
        else:
            road, slope = rng.uniform(horizon + 0.17, 0.52), rng.uniform(-0.02, 0.02)
        lane, median = rng.uniform(0.105, 0.16), float(rng.choice([0.0, 0.0, rng.uniform(0.012, 0.022)]))
        pools = _TRAIN_TEXTURES
    textures = (str(rng.choice(pools[0])), str(rng.choice(pools[1])), str(rng.choice(pools[2])))
    plain = Layout(name, float(horizon), float(road), float(slope), float(lane), float(median), body,
                   Zone(0, 0, 0, 0, _ZONE_COLORS[0], False), textures, int(rng.integers(2**31)))  # fmt: skip
    zone = _place_zone(plain, rng)
    return Layout(plain.name, plain.horizon, plain.road, plain.slope, plain.lane, plain.median, body, zone, textures,
                  plain.seed)  # fmt: skip


def _place_zone(layout: Layout, rng: np.random.Generator) -> Zone:
    """On the widest walk, to one side, leaving a path in front of it or behind it."""
    low, high = max(layout.walks(), key=lambda band: band[1] - band[0])
    height = min(0.65 * (high - low), 0.19)
    y0 = low + 0.02 if rng.random() < 0.5 else high - height
    width = float(rng.uniform(0.45, 0.65))
    x0 = float(rng.choice([rng.uniform(0.08, 0.25), rng.uniform(ASPECT - width - 0.25, ASPECT - width - 0.08)]))
    color = _ZONE_COLORS[int(rng.integers(len(_ZONE_COLORS)))]
    return Zone(x0, x0 + width, float(y0), float(y0 + height), color, bool(rng.random() < 0.5))
