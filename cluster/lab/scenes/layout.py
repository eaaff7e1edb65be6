"""Where the ground of a scene is road, pavement or forbidden, and how large things are at each place.

Coordinates are in picture heights: x runs from 0 to ``ASPECT``, y from 0 (top) to 1 (bottom).
"""

from __future__ import annotations

from dataclasses import dataclass

ASPECT = 16 / 9
Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Zone:
    """A marked area nobody may enter: a parallelogram on the ground, ``fence``: with a low railing in front of it.

    It is hatched: ``pitch`` of the stripes, how far they lean (``tilt``), their share of the pitch, and how opaque.
    """

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
