"""Camera views: three kinds for validation, two others for test, and everything but the test views for training."""

from dataclasses import dataclass, replace

import numpy as np

from cluster.lab.scenes.textures import MIXED, RANDOM
from cluster.lab.scenes.vocabulary import Split

ASPECT = 16 / 9
Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Zone:
    """A restricted area marked by hatching on the ground. ``pitch``, ``tilt``, ``share`` and ``opaque`` describe the
    stripes; ``fence``: whether there is a low railing in front."""

    x0: float
    x1: float
    y0: float
    y1: float
    color: Color
    fence: bool
    pitch: float = 0.085
    tilt: float = 1.0
    share: float = 0.36
    opaque: float = 0.75


@dataclass(frozen=True, slots=True)
class Layout:
    """A camera's fixed view; lengths in picture heights.

    Traffic keeps right: to the right on the lane near the camera, to the left on the far one. ``road``: y of the centre
    line in the middle of the picture, ``slope``: its rise per unit of x, ``lane``: height of a lane, ``median``: height
    of the strip between the lanes, ``body``: scale of people.
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
        """y of the road's centre line."""
        return self.road + self.slope * (x - ASPECT / 2)

    def lane_y(self, near: bool, x: float) -> float:
        """y of a vehicle's wheels on a lane."""
        offset = 0.82 * self.lane + self.median / 2 if near else -0.18 * self.lane - self.median / 2
        return self.middle(x) + offset

    def road_top(self, x: float) -> float:
        return self.middle(x) - self.lane - self.median / 2

    def road_bottom(self, x: float) -> float:
        return self.middle(x) + self.lane + self.median / 2

    def person_height(self, y: float) -> float:
        """Height of an adult with feet at ``y``."""
        return self.body * (0.55 + 0.75 * y)

    def pavements(self) -> list[tuple[float, float]]:
        """Bands of y for pedestrians, above and below the road, if wide enough."""
        bands = []
        far = (max(self.horizon + 0.05, 0.25), min(self.road_top(0), self.road_top(ASPECT)) - 0.02)
        near = (max(self.road_bottom(0), self.road_bottom(ASPECT)) + 0.05, 0.97)
        for low, high in (far, near):
            if high - low > 0.05:
                bands.append((low, high))
        return bands


_Pools = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
# Mostly random: a model that has seen only ten surfaces mistakes any other for an object.
_TRAIN_TEXTURES: _Pools = (
    ("asphalt", "concrete", "gravel", *(RANDOM,) * 3),
    ("slabs", "concrete", "grass", "gravel", *(RANDOM,) * 4),
    ("brick", "plaster", "sheet", *(RANDOM,) * 3),
)
_TEST_TEXTURES: _Pools = (("worn", "cobble"), ("tiles", "cobble"), ("panel", "hedge"))
_ZONE_COLORS: tuple[Color, ...] = ((214, 180, 40), (200, 60, 48), (222, 130, 40))
NO_ZONE = Zone(0, 0, 0, 0, _ZONE_COLORS[0], False)
# Geometry of the test views, with a margin, which training never draws.
HELD_OUT_ROAD = (0.735, 0.805)
HELD_OUT_SLOPE = (-0.105, -0.07)
_TRIES = 1000


def make_layout(split: Split, rng: np.random.Generator) -> Layout:
    """Draw a view: streets, avenues and yards for validation; these and arbitrary proportions for training; lots and
    boulevards for test, with geometry and textures that do not occur in the other splits."""
    if split == "train" and rng.random() < 0.75:
        return _random_layout(rng)
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
    plain = Layout(name, float(horizon), float(road), float(slope), float(lane), float(median), body, NO_ZONE,
                   textures, int(rng.integers(2**31)))  # fmt: skip
    return replace(plain, zone=_place_zone(plain, rng))


def _place_zone(layout: Layout, rng: np.random.Generator) -> Zone:
    """Zone on the widest pavement, off centre, with a path left in front of it or behind it."""
    low, high = max(layout.pavements(), key=lambda band: band[1] - band[0])
    height = min(0.65 * (high - low), 0.19)
    y0 = low + 0.02 if rng.random() < 0.5 else high - height
    width = float(rng.uniform(0.45, 0.65))
    x0 = float(rng.choice([rng.uniform(0.08, 0.25), rng.uniform(ASPECT - width - 0.25, ASPECT - width - 0.08)]))
    color = _ZONE_COLORS[int(rng.integers(len(_ZONE_COLORS)))]
    return Zone(x0, x0 + width, float(y0), float(y0 + height), color, bool(rng.random() < 0.5))


def _random_layout(rng: np.random.Generator) -> Layout:
    """View of arbitrary proportions with space for a zone and both lanes, excluding test geometry."""
    for _ in range(_TRIES):
        flat = rng.random() < 0.4
        layout = Layout(
            name="place",
            horizon=float(rng.uniform(0.1, 0.34)),
            road=float(rng.uniform(0.38, 0.88)),
            slope=float(rng.uniform(-0.03, 0.03) if flat else rng.uniform(-0.13, 0.13)),
            lane=float(rng.uniform(0.095, 0.17)),
            median=float(rng.uniform(0.01, 0.05) if rng.random() < 0.4 else 0.0),
            body=float(rng.uniform(0.29, 0.48)),
            zone=NO_ZONE,
            textures=(_surface(_TRAIN_TEXTURES[0], rng), _surface(_TRAIN_TEXTURES[1], rng),
                      _surface(_TRAIN_TEXTURES[2], rng)),
            seed=int(rng.integers(2**31)),
        )  # fmt: skip
        if _fits(layout):
            return replace(layout, zone=_random_zone(layout, rng))
    raise AssertionError("no view fits: the parameter ranges leave no room")


def _surface(pool: tuple[str, ...], rng: np.random.Generator) -> str:
    return MIXED if rng.random() < 0.55 else str(rng.choice(pool))


def _fits(layout: Layout) -> bool:
    ends = (0.0, ASPECT)
    return (
        not HELD_OUT_ROAD[0] < layout.road < HELD_OUT_ROAD[1]
        and not HELD_OUT_SLOPE[0] < layout.slope < HELD_OUT_SLOPE[1]
        and min(layout.road_top(x) for x in ends) > layout.horizon + 0.03
        and max(layout.lane_y(True, x) for x in ends) < 0.985
        and max((high - low for low, high in layout.pavements()), default=0.0) > 0.11
    )


def _random_zone(layout: Layout, rng: np.random.Generator) -> Zone:
    """Zone on any wide enough pavement, with random hatching."""
    bands = [band for band in layout.pavements() if band[1] - band[0] > 0.1]
    low, high = bands[int(rng.integers(len(bands)))]
    height = min(0.65 * (high - low), float(rng.uniform(0.08, 0.24)))
    y0 = low + 0.02 if rng.random() < 0.5 else high - height
    width = float(rng.uniform(0.4, 0.8))
    x0 = float(rng.uniform(0.04, ASPECT - width - 0.04))
    base = _ZONE_COLORS[int(rng.integers(len(_ZONE_COLORS)))]
    red, green, blue = (int(np.clip(part + rng.integers(-24, 25), 0, 255)) for part in base)
    return Zone(
        x0, x0 + width, float(y0), float(y0 + height), (red, green, blue), bool(rng.random() < 0.5),
        pitch=float(rng.uniform(0.06, 0.12)), tilt=float(rng.choice([-1, 1]) * rng.uniform(0.4, 1.4)),
        share=float(rng.uniform(0.28, 0.48)), opaque=float(rng.uniform(0.45, 0.9)),
    )  # fmt: skip
