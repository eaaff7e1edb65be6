"""The six kinds of event and the distractors that resemble them. Each function adds one to a scene at about ``at``
seconds."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cluster.lab.scenes.actors import COLORS, Actor, Keyframe
from cluster.lab.scenes.layouts import ASPECT, Layout
from cluster.lab.scenes.sprites import VEHICLE_SIZES
from cluster.lab.scenes.vocabulary import SceneEvent

_OUT = 0.25
# Scale of vehicles relative to people: a bus true to scale would hide half of the picture.
VEHICLE_SCALE = 0.78


@dataclass(slots=True)
class SceneBuilder:
    """A scene under construction. ``contrast`` and ``pace`` apply to actors of events (1: normal)."""

    layout: Layout
    seconds: float
    rng: np.random.Generator
    contrast: float = 1.0
    pace: float = 1.0
    actors: list[Actor] = field(default_factory=list)
    events: list[SceneEvent] = field(default_factory=list)

    def uniform(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def random_direction(self) -> int:
        return 1 if self.chance(0.5) else -1

    def add_actor(self, kind: str, keys: list[Keyframe], **more: object) -> Actor:
        """Append an actor; colour, scale and seed are random unless given."""
        drawn: dict[str, object] = {
            "color": str(self.rng.choice(list(COLORS))),
            "scale": {"person": self.uniform(0.9, 1.1), "vehicle": VEHICLE_SCALE}.get(kind, 1.0),
            "seed": int(self.rng.integers(2**16)),
        }
        actor = Actor(len(self.actors), kind, tuple(keys), **{**drawn, **more})  # type: ignore[arg-type]
        self.actors.append(actor)
        return actor

    def add_bag(self, keys: list[Keyframe], **more: object) -> Actor:
        form, color = self.rng.choice(["case", "box", "sack"]), self.rng.choice(["black", "red", "blue", "yellow"])
        return self.add_actor("bag", keys, form=str(form), color=str(color), **more)

    def pavement_y(self) -> float:
        """Random y on a pavement at which a walk does not cross the marked zone."""
        bands = self.layout.pavements()
        zone = self.layout.zone
        for _ in range(30):
            low, high = bands[int(self.rng.integers(len(bands)))]
            y = self.uniform(low, high)
            if not zone.y0 - 0.05 < y < zone.y1 + 0.05:
                return y
        return zone.y1 + 0.055 if zone.y1 + 0.055 < 1.0 else zone.y0 - 0.055

    def walking_speed(self, y: float) -> float:
        """Picture heights per second of a person walking at ``y``."""
        return 0.8 * self.layout.person_height(y) * self.uniform(0.8, 1.15)

    def pavement_spot(self, *, margin: float = 0.3) -> tuple[float, float]:
        """Random position on a pavement, outside the marked zone."""
        return self.uniform(margin, ASPECT - margin), self.pavement_y()

    def outside_x(self, direction: int) -> float:
        """x outside the picture from which an actor moving in ``direction`` enters."""
        return -_OUT if direction > 0 else ASPECT + _OUT

    def walk_in(self, x: float, y: float, arrive: float, direction: int, speed: float, then: str) -> list[Keyframe]:
        """Keyframes of a person who reaches ``(x, y)`` at time ``arrive`` and changes to state ``then``."""
        start = self.outside_x(direction)
        return [Keyframe(arrive - abs(x - start) / speed, start, y, "walking"), Keyframe(arrive, x, y, then)]

    def walk_out(
        self, x: float, y: float, leave: float, direction: int, speed: float, state: str = "walking"
    ) -> list[Keyframe]:
        """Keyframes of a person who leaves ``(x, y)`` at time ``leave``."""
        end = self.outside_x(-direction)
        return [Keyframe(leave, x, y, state), Keyframe(leave + abs(end - x) / speed, end, y, state)]

    def throughout(self, x: float, y: float, state: str) -> list[Keyframe]:
        """Keyframes of an actor that stays in place for the whole scene."""
        return [Keyframe(-1.0, x, y, state), Keyframe(self.seconds + 1, x, y, state)]

    def random_lane(self) -> tuple[bool, int]:
        """Random lane: whether it is the one near the camera, and its direction."""
        near = self.chance(0.5)
        return near, 1 if near else -1

    def vehicle_form(self) -> str:
        return str(self.rng.choice(["car", "car", "car", "van", "bus"]))

    def lane_key(self, t: float, x: float, near: bool, state: str) -> Keyframe:
        return Keyframe(t, x, self.layout.lane_y(near, x), state)

    def lane_ends(self, direction: int, form: str, near: bool) -> tuple[float, float]:
        """x at which a vehicle enters and leaves, outside the picture."""
        reach = 0.6 * VEHICLE_SIZES[form][0] * self.layout.person_height(self.layout.lane_y(near, 0.9))
        return (-reach, ASPECT + reach) if direction > 0 else (ASPECT + reach, -reach)

    def drive_through(self, t: float, *, near: bool, direction: int, speed: float, **more: object) -> Actor:
        """Add a vehicle that drives through on a lane, entering at ``t``."""
        form = str(more.pop("form", None) or self.vehicle_form())
        start, end = self.lane_ends(direction, form, near)
        gone = t + abs(end - start) / speed
        keys = [self.lane_key(t, start, near, "driving"), self.lane_key(gone, end, near, "driving")]
        return self.add_actor("vehicle", keys, form=form, **more)


def passer_by(builder: SceneBuilder, at: float) -> None:
    """A person, sometimes a small group, walks through; some carry a bag all the way."""
    y, direction = builder.pavement_y(), builder.random_direction()
    for member in range(1 if builder.chance(0.75) else int(builder.rng.integers(2, 4))):
        speed = builder.walking_speed(y)
        keys = builder.walk_out(builder.outside_x(direction), y, at + 0.5 * member, direction, speed)
        carries = (0.0, builder.seconds + 1) if builder.chance(0.25) else None
        builder.add_actor("person", keys, carries=carries)
        y = min(0.97, y + builder.uniform(0.0, 0.03))


def runner(builder: SceneBuilder, at: float) -> None:
    """A person runs through alone."""
    y, direction = builder.pavement_y(), builder.random_direction()
    speed = 2.2 * builder.walking_speed(y)
    builder.add_actor("person", builder.walk_out(builder.outside_x(direction), y, at, direction, speed, "running"))


def crouch(builder: SceneBuilder, at: float) -> None:
    """A person ties a shoe and walks on."""
    x, y = builder.pavement_spot()
    direction, speed = builder.random_direction(), builder.walking_speed(y)
    keys = builder.walk_in(x, y, at, direction, speed, "crouching")
    keys += builder.walk_out(x, y, at + builder.uniform(3, 7), direction, speed)
    builder.add_actor("person", keys)


def talk(builder: SceneBuilder, at: float) -> None:
    """Two people meet, stand close together and part without a fight."""
    x, y = builder.pavement_spot(margin=0.45)
    gap = builder.uniform(0.18, 0.3) * builder.layout.person_height(y)
    lasting = builder.uniform(5, 12)
    for side in (-1, 1):
        place, speed = x + side * gap, builder.walking_speed(y)
        keys = builder.walk_in(place, y, at, -side, speed, "standing")
        keys += builder.walk_out(place, y, at + lasting, -side, speed)
        builder.add_actor("person", keys)


def skirt_zone(builder: SceneBuilder, at: float) -> None:
    """A person walks along the marked zone without entering it."""
    zone = builder.layout.zone
    direction = builder.random_direction()
    front = zone.y1 + builder.uniform(0.05, 0.08)
    low, high = max(builder.layout.pavements(), key=lambda band: band[1] - band[0])
    y = front if front < high + 0.02 else zone.y0 - builder.uniform(0.05, 0.08)
    y = max(y, low - 0.02)
    speed = builder.walking_speed(y)
    x = builder.uniform(zone.x0, zone.x1)
    keys = builder.walk_in(x, y, at, direction, speed, "standing")
    keys += builder.walk_out(x, y, at + builder.uniform(0.5, 5), direction, speed)
    builder.add_actor("person", keys)


def waits_with_bag(builder: SceneBuilder, at: float) -> None:
    """A person puts a bag down, waits beside it and takes it away."""
    x, y = builder.pavement_spot(margin=0.35)
    direction, speed = builder.random_direction(), builder.walking_speed(y)
    down, up = at + 0.8, at + builder.uniform(5, 11)
    keys = [*builder.walk_in(x, y, at, direction, speed, "crouching"), Keyframe(down, x, y, "standing")]
    keys += [Keyframe(up - 0.8, x, y, "crouching"), *builder.walk_out(x, y, up, direction, speed)]
    builder.add_actor("person", keys, carries=(keys[0].t, down))
    bag_x = x + 0.12 * builder.layout.person_height(y) * direction
    builder.add_bag([Keyframe(down, bag_x, y, "attended"), Keyframe(up, bag_x, y, "attended")])


def standing_bag(builder: SceneBuilder, at: float) -> None:  # noqa: ARG001 - always there
    """A box or bin that stands there for the whole scene."""
    x, y = builder.pavement_spot(margin=0.15)
    builder.add_bag(builder.throughout(x, y, "furniture"))


def sitter(builder: SceneBuilder, at: float) -> None:  # noqa: ARG001 - always there
    """A person sits on a box for the whole scene."""
    x, y = builder.pavement_spot(margin=0.2)
    builder.add_actor("person", builder.throughout(x, y, "sitting"), facing=builder.random_direction())


def traffic(builder: SceneBuilder, at: float) -> None:
    """A vehicle drives through on its lane."""
    near, direction = builder.random_lane()
    builder.drive_through(at, near=near, direction=direction, speed=builder.uniform(0.28, 0.75))


def brief_stop(builder: SceneBuilder, at: float) -> None:
    """A vehicle halts for a moment and drives on."""
    near, direction = builder.random_lane()
    form = builder.vehicle_form()
    start, end = builder.lane_ends(direction, form, near)
    x, speed = builder.uniform(0.4, ASPECT - 0.4), builder.uniform(0.3, 0.55)
    halt = builder.uniform(0.8, 1.8)
    keys = [builder.lane_key(at, start, near, "driving")]
    stop = at + abs(x - start) / speed
    keys += [builder.lane_key(stop, x, near, "driving"), builder.lane_key(stop + halt, x, near, "driving")]
    keys.append(builder.lane_key(stop + halt + abs(end - x) / speed, end, near, "driving"))
    builder.add_actor("vehicle", keys, form=form, facing=direction)


def parked(builder: SceneBuilder, at: float) -> None:  # noqa: ARG001 - always there
    """A car parked at the far kerb, off the road, facing either way."""
    x = builder.uniform(0.3, ASPECT - 0.3)
    y = builder.layout.road_top(x) - 0.005
    zone = builder.layout.zone
    over_zone = zone.x0 - 0.4 < x < zone.x1 + 0.4 and zone.y0 - 0.02 < y < zone.y1 + 0.3
    if y - 0.05 < builder.layout.horizon or over_zone:
        return
    keys, facing = builder.throughout(x, y, "parked"), builder.random_direction()
    builder.add_actor("vehicle", keys, form="car", facing=facing, scale=0.9 * VEHICLE_SCALE)


DISTRACTORS: dict[str, Callable[[SceneBuilder, float], None]] = {
    each.__name__: each
    for each in (runner, crouch, talk, skirt_zone, waits_with_bag, standing_bag, sitter, brief_stop, parked)
}


_FALL_S = 0.6


def fall(builder: SceneBuilder, at: float) -> None:
    """A person walks in, falls and stays down until the scene's end (or for at least 14 s)."""
    x, y = builder.pavement_spot(margin=0.4)
    direction, speed = builder.random_direction(), builder.walking_speed(y) * builder.pace
    up = builder.seconds + 1 if builder.chance(0.7) else at + builder.uniform(14, 20)
    keys = builder.walk_in(x, y, at, direction, speed, "lying")
    last = min(up, builder.seconds + 1)
    keys.append(Keyframe(last, x + 0.02 * direction, y, "lying"))
    _event(builder, "fall", at + _FALL_S, min(last, builder.seconds), [_event_person(builder, keys, direction)])


def fight(builder: SceneBuilder, at: float) -> None:
    """Two people meet, fight for 7 to 11 s and run apart."""
    x, y = builder.pavement_spot(margin=0.45)
    gap = 0.2 * builder.layout.person_height(y)
    lasting = builder.uniform(7, 11)
    people = []
    for side in (-1, 1):
        speed = builder.walking_speed(y) * builder.pace
        place = x + side * gap
        keys = builder.walk_in(place, y, at, -side, speed, "fighting")
        keys += builder.walk_out(place, y, at + lasting, side, 1.8 * builder.walking_speed(y), "running")
        people.append(_event_person(builder, keys, 0))
    _event(builder, "fight", at, min(at + lasting, builder.seconds), people)


def intrusion(builder: SceneBuilder, at: float) -> None:
    """A person crosses or climbs into the marked zone, stays a while and leaves."""
    zone = builder.layout.zone
    direction = builder.random_direction()
    entry_x = builder.uniform(zone.x0 + 0.1, zone.x1 - 0.1)
    outside = builder.pavement_y()
    inside_y = builder.uniform(zone.y0 + 0.35 * (zone.y1 - zone.y0), zone.y1 - 0.2 * (zone.y1 - zone.y0))
    speed = builder.walking_speed(outside) * builder.pace
    edge_y = zone.y1 if outside > zone.y1 else zone.y0 if outside < zone.y0 else outside
    cross = at - abs(outside - edge_y) / max(speed, 1e-3)
    keys = builder.walk_in(entry_x, outside, cross, direction, speed, "walking")
    if zone.fence:
        keys += [
            Keyframe(at, entry_x, edge_y, "climbing"),
            Keyframe(at + 0.8, entry_x, (edge_y + inside_y) / 2, "climbing", 0.3),
            Keyframe(at + 1.6, entry_x, inside_y, "walking"),
        ]
    else:
        keys += [Keyframe(at, entry_x, edge_y, "walking"), Keyframe(at + 1.2, entry_x, inside_y, "walking")]
    to_x = builder.uniform(zone.x0 + 0.08, zone.x1 - 0.08)
    arrived = at + 1.6 + abs(to_x - entry_x) / speed
    leave = max(arrived, at + 3) + builder.uniform(3, 7)
    keys += [Keyframe(arrived, to_x, inside_y, "standing"), Keyframe(leave, to_x, inside_y, "walking")]
    out = leave + abs(outside - inside_y) / speed + 0.3
    keys.append(Keyframe(out, to_x, outside, "walking"))
    keys += builder.walk_out(to_x, outside, out + 0.01, direction, speed)
    # The intrusion ends when the zone's edge is crossed on the way back to the path.
    left = leave + (out - leave) * abs(edge_y - inside_y) / abs(outside - inside_y)
    _event(builder, "intrusion", at, min(left, builder.seconds), [_event_person(builder, keys, 0)])


def left_object(builder: SceneBuilder, at: float) -> None:
    """A person puts a bag down and walks away without it."""
    x, y = builder.pavement_spot(margin=0.35)
    direction, speed = builder.random_direction(), builder.walking_speed(y) * builder.pace
    down = at - builder.uniform(0.8, 1.6)
    keys = builder.walk_in(x, y, down - 0.8, direction, speed, "crouching")
    keys += [Keyframe(down, x, y, "standing"), *builder.walk_out(x, y, at, direction, speed)]
    owner = _event_person(builder, keys, 0, carries=(keys[0].t, down))
    bag_x = x + 0.12 * builder.layout.person_height(y) * direction
    keys = [Keyframe(down, bag_x, y, "attended"), Keyframe(at, bag_x, y, "left")]
    bag = builder.add_bag([*keys, Keyframe(builder.seconds + 1, bag_x, y, "left")], contrast=builder.contrast)
    _event(builder, "left_object", at, builder.seconds, [owner, bag])


def stopped_vehicle(builder: SceneBuilder, at: float) -> None:
    """A vehicle stops on its lane until the scene's end (or for at least 12 s)."""
    near, direction = builder.random_lane()
    form = str(builder.rng.choice(["car", "car", "van"]))
    start, end = builder.lane_ends(direction, form, near)
    x = builder.uniform(0.45, ASPECT - 0.45)
    speed = builder.uniform(0.3, 0.6) * builder.pace
    slow_x = x - direction * 0.15
    arrive = at - 0.15 / (0.5 * speed)
    keys = [
        builder.lane_key(arrive - abs(slow_x - start) / speed, start, near, "driving"),
        builder.lane_key(arrive, slow_x, near, "driving"),
        builder.lane_key(at, x, near, "stopped"),
    ]
    leave = builder.seconds + 1 if builder.chance(0.7) else at + builder.uniform(12, 16)
    keys.append(builder.lane_key(leave, x, near, "driving"))
    if leave < builder.seconds:
        keys.append(builder.lane_key(leave + abs(end - x) / speed, end, near, "driving"))
    actor = builder.add_actor("vehicle", keys, form=form, facing=direction, contrast=builder.contrast)
    _event(builder, "stopped_vehicle", at, min(leave, builder.seconds), [actor])


def wrong_way(builder: SceneBuilder, at: float) -> None:
    """A vehicle drives against the direction of its lane."""
    near, direction = builder.random_lane()
    form = builder.vehicle_form()
    speed = builder.uniform(0.28, 0.45) * builder.pace
    actor = builder.drive_through(
        at, near=near, direction=-direction, speed=speed, form=form, contrast=builder.contrast
    )
    _event(builder, "wrong_way", at, min(actor.keys[-1].t, builder.seconds), [actor])


def _event_person(builder: SceneBuilder, keys: list[Keyframe], facing: int, **more: object) -> Actor:
    return builder.add_actor("person", keys, facing=facing, contrast=builder.contrast, **more)


def _event(builder: SceneBuilder, kind: str, start: float, end: float, actors: list[Actor]) -> None:
    builder.events.append(SceneEvent(kind, round(start, 3), round(end, 3), tuple(actor.id for actor in actors)))


EVENTS: dict[str, Callable[[SceneBuilder, float], None]] = {
    each.__name__: each for each in (fall, fight, intrusion, left_object, stopped_vehicle, wrong_way)
}
