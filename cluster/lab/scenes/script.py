"""What every scene is written with: ids, tracks across the picture, and the pace of people and vehicles."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cluster.lab.scenes.actors import COLORS, Actor, Key
from cluster.lab.scenes.figures import VEHICLE_SIZES
from cluster.lab.scenes.layout import ASPECT, Layout
from cluster.lab.scenes.vocabulary import SceneEvent

_OUT = 0.25
# Against people: true to scale, a bus beside somebody three tokens high would hide half of the picture.
VEHICLE_SCALE = 0.78


@dataclass(slots=True)
class Script:
    """A scene while it is being written. ``contrast`` and ``pace`` are those of the actors of events (1: ordinary)."""

    layout: Layout
    seconds: float
    rng: np.random.Generator
    contrast: float = 1.0
    pace: float = 1.0
    actors: list[Actor] = field(default_factory=list)
    events: list[SceneEvent] = field(default_factory=list)

    # -- chance -----------------------------------------------------------------------------------
    def between(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def sign(self) -> int:
        return 1 if self.chance(0.5) else -1

    # -- actors -----------------------------------------------------------------------------------
    def add(self, kind: str, keys: list[Key], **more: object) -> Actor:
        """Append an actor; colours and looks are drawn unless given."""
        drawn: dict[str, object] = {
            "color": str(self.rng.choice(list(COLORS))),
            "scale": {"person": self.between(0.9, 1.1), "vehicle": VEHICLE_SCALE}.get(kind, 1.0),
            "seed": int(self.rng.integers(2**16)),
        }
        actor = Actor(len(self.actors), kind, tuple(keys), **{**drawn, **more})  # type: ignore[arg-type]
        self.actors.append(actor)
        return actor

    def walk_y(self, *, outside_zone: bool = True) -> float:
        """A height on a pavement; by default one whose path meets no marked zone."""
        bands = self.layout.walks()
        zone = self.layout.zone
        for _ in range(30):
            low, high = bands[int(self.rng.integers(len(bands)))]
            y = self.between(low, high)
            if not outside_zone or not zone.y0 - 0.05 < y < zone.y1 + 0.05:
                return y
        return zone.y1 + 0.055 if zone.y1 + 0.055 < 1.0 else zone.y0 - 0.055

    def walking_speed(self, y: float) -> float:
        """Picture heights per second of somebody who walks at ``y``."""
        return 0.8 * self.layout.size(y) * self.between(0.8, 1.15)

    def spot(self, *, margin: float = 0.3) -> tuple[float, float]:
        """A place on a pavement, outside of the zone."""
        return self.between(margin, ASPECT - margin), self.walk_y()

    def edge(self, direction: int) -> float:
        """x outside of the picture from which one enters when going in ``direction``."""
        return -_OUT if direction > 0 else ASPECT + _OUT

    def walk_in(self, x: float, y: float, arrive: float, direction: int, speed: float) -> list[Key]:
        """The key of somebody who comes along a pavement and is at ``(x, y)`` at ``arrive``."""
        start = self.edge(direction)
        return [Key(arrive - abs(x - start) / speed, start, y, "walking")]

    def walk_out(self, x: float, y: float, leave: float, direction: int, speed: float) -> list[Key]:
        """The keys of somebody who sets off from ``(x, y)`` at ``leave``."""
        end = self.edge(-direction)
        gone = leave + abs(end - x) / speed
        return [Key(leave, x, y, "walking"), Key(gone, end, y, "walking")]

    # -- vehicles ---------------------------------------------------------------------------------
    def vehicle_form(self) -> str:
        return str(self.rng.choice(["car", "car", "car", "van", "bus"]))

    def lane_key(self, t: float, x: float, near: bool, state: str) -> Key:
        return Key(t, x, self.layout.lane_y(near, x), state)

    def lane_ends(self, direction: int, form: str, near: bool) -> tuple[float, float]:
        """x where a vehicle enters and leaves the picture, out of sight."""
        reach = 0.6 * VEHICLE_SIZES[form][0] * self.layout.size(self.layout.lane_y(near, 0.9))
        return (-reach, ASPECT + reach) if direction > 0 else (ASPECT + reach, -reach)

    def drive_through(self, t: float, *, near: bool, direction: int, speed: float, **more: object) -> Actor:
        """A vehicle on a lane from edge to edge, entering at ``t``."""
        form = str(more.pop("form", None) or self.vehicle_form())
        start, end = self.lane_ends(direction, form, near)
        gone = t + abs(end - start) / speed
        keys = [self.lane_key(t, start, near, "driving"), self.lane_key(gone, end, near, "driving")]
        return self.add("vehicle", keys, form=form, **more)
