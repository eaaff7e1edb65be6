"""The six events. Each function writes one into a script, beginning about ``at`` seconds into the scene."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cluster.lab.scenes.figures import VEHICLE_SIZES
from cluster.lab.scenes.places import ASPECT, COLORS, Actor, Key, Layout
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


def passer_by(script: Script, at: float) -> None:
    """Somebody walks through, now and then a small group, some with a bag that they keep."""
    y, direction = script.walk_y(), script.sign()
    for member in range(1 if script.chance(0.75) else int(script.rng.integers(2, 4))):
        speed = script.walking_speed(y)
        keys = script.walk_out(script.edge(direction), y, at + 0.5 * member, direction, speed)
        carries = (0.0, script.seconds + 1) if script.chance(0.25) else None
        script.add("person", keys, carries=carries)
        y = min(0.97, y + script.between(0.0, 0.03))


def runner(script: Script, at: float) -> None:
    """Somebody runs through: fast, but alone."""
    y, direction = script.walk_y(), script.sign()
    speed = 2.2 * script.walking_speed(y)
    start, end = script.edge(direction), script.edge(-direction)
    script.add("person", [Key(at, start, y, "running"), Key(at + abs(end - start) / speed, end, y, "running")])


def crouch(script: Script, at: float) -> None:
    """Somebody ties a shoe and goes on."""
    x, y = script.spot()
    direction, speed = script.sign(), script.walking_speed(y)
    keys = [*script.walk_in(x, y, at, direction, speed), Key(at, x, y, "crouching")]
    keys += script.walk_out(x, y, at + script.between(3, 7), direction, speed)
    script.add("person", keys)


def talk(script: Script, at: float) -> None:
    """Two people meet, stand close to each other and part: no fight."""
    x, y = script.spot(margin=0.45)
    gap = script.between(0.18, 0.3) * script.layout.size(y)
    lasting = script.between(5, 12)
    for side in (-1, 1):
        place, speed = x + side * gap, script.walking_speed(y)
        keys = [*script.walk_in(place, y, at, -side, speed), Key(at, place, y, "standing")]
        keys += script.walk_out(place, y, at + lasting, -side, speed)
        script.add("person", keys)


def skirt_zone(script: Script, at: float) -> None:
    """Somebody walks close along the marked zone without entering it."""
    zone = script.layout.zone
    direction = script.sign()
    front = zone.y1 + script.between(0.05, 0.08)
    low, high = max(script.layout.walks(), key=lambda band: band[1] - band[0])
    y = front if front < high + 0.02 else zone.y0 - script.between(0.05, 0.08)
    y = max(y, low - 0.02)
    speed = script.walking_speed(y)
    x = script.between(zone.x0, zone.x1)
    keys = [*script.walk_in(x, y, at, direction, speed), Key(at, x, y, "standing")]
    keys += script.walk_out(x, y, at + script.between(0.5, 5), direction, speed)
    script.add("person", keys)


def waits_with_bag(script: Script, at: float) -> None:
    """Somebody puts a bag down, waits beside it and takes it along again."""
    x, y = script.spot(margin=0.35)
    direction, speed = script.sign(), script.walking_speed(y)
    down, up = at + 0.8, at + script.between(5, 11)
    keys = [*script.walk_in(x, y, at, direction, speed), Key(at, x, y, "crouching"), Key(down, x, y, "standing")]
    keys += [Key(up - 0.8, x, y, "crouching"), *script.walk_out(x, y, up, direction, speed)]
    script.add("person", keys, carries=(keys[0].t, down))
    bag_x = x + 0.12 * script.layout.size(y) * direction
    script.add("bag", [Key(down, bag_x, y, "attended"), Key(up, bag_x, y, "attended")],
               form=str(script.rng.choice(["case", "box", "sack"])),
               color=str(script.rng.choice(["black", "red", "blue", "yellow"])))  # fmt: skip


def standing_bag(script: Script, at: float) -> None:  # noqa: ARG001 - always there
    """A box or a bin that belongs where it is, from the first picture to the last."""
    x, y = script.spot(margin=0.15)
    script.add("bag", [Key(-1.0, x, y, "furniture"), Key(script.seconds + 1, x, y, "furniture")],
               form=str(script.rng.choice(["case", "box", "sack"])),
               color=str(script.rng.choice(["black", "red", "blue", "yellow"])))  # fmt: skip


def sitter(script: Script, at: float) -> None:  # noqa: ARG001 - always there
    """Somebody sits on a box all the time."""
    x, y = script.spot(margin=0.2)
    script.add("person", [Key(-1.0, x, y, "sitting"), Key(script.seconds + 1, x, y, "sitting")], facing=script.sign())


def traffic(script: Script, at: float) -> None:
    """A vehicle on its lane."""
    near = script.chance(0.5)
    script.drive_through(at, near=near, direction=1 if near else -1, speed=script.between(0.28, 0.75))


def brief_stop(script: Script, at: float) -> None:
    """A vehicle that halts for a moment and goes on."""
    near = script.chance(0.5)
    direction = 1 if near else -1
    form = script.vehicle_form()
    start, end = script.lane_ends(direction, form, near)
    x, speed = script.between(0.4, ASPECT - 0.4), script.between(0.3, 0.55)
    halt = script.between(0.8, 1.8)
    keys = [script.lane_key(at, start, near, "driving")]
    stop = at + abs(x - start) / speed
    keys += [script.lane_key(stop, x, near, "driving"), script.lane_key(stop + halt, x, near, "driving")]
    keys.append(script.lane_key(stop + halt + abs(end - x) / speed, end, near, "driving"))
    script.add("vehicle", keys, form=form, facing=direction)


def parked(script: Script, at: float) -> None:  # noqa: ARG001 - always there
    """A car at the far kerb, off the road, all the time; it may face either way."""
    x = script.between(0.3, ASPECT - 0.3)
    y = script.layout.road_top(x) - 0.005
    zone = script.layout.zone
    over_zone = zone.x0 - 0.4 < x < zone.x1 + 0.4 and zone.y0 - 0.02 < y < zone.y1 + 0.3
    if y - 0.05 < script.layout.horizon or over_zone:
        return
    keys = [Key(-1.0, x, y, "parked"), Key(script.seconds + 1, x, y, "parked")]
    script.add("vehicle", keys, form="car", facing=script.sign(), scale=0.9 * VEHICLE_SCALE)


DISTRACTORS: dict[str, Callable[[Script, float], None]] = {
    "runner": runner,
    "crouch": crouch,
    "talk": talk,
    "skirt_zone": skirt_zone,
    "waits_with_bag": waits_with_bag,
    "standing_bag": standing_bag,
    "sitter": sitter,
    "brief_stop": brief_stop,
    "parked": parked,
}


_FALL_S = 0.6


def fall(script: Script, at: float) -> None:
    """Somebody walks in, falls and stays down until the scene ends (or for at least 14 s)."""
    x, y = script.spot(margin=0.4)
    direction, speed = script.sign(), script.walking_speed(y) * script.pace
    up = script.seconds + 1 if script.chance(0.7) else at + script.between(14, 20)
    keys = [*script.walk_in(x, y, at, direction, speed), Key(at, x, y, "lying")]
    last = min(up, script.seconds + 1)
    keys.append(Key(last, x + 0.02 * direction, y, "lying"))
    _event(script, "fall", at + _FALL_S, min(last, script.seconds), [_event_person(script, keys, direction)])


def fight(script: Script, at: float) -> None:
    """Two people meet, hit each other for some seconds and run apart."""
    x, y = script.spot(margin=0.45)
    gap = 0.2 * script.layout.size(y)
    lasting = script.between(7, 11)
    people = []
    for side in (-1, 1):
        speed = script.walking_speed(y) * script.pace
        place = x + side * gap
        keys = [*script.walk_in(place, y, at, -side, speed), Key(at, place, y, "fighting")]
        run = 1.8 * script.walking_speed(y)
        end = script.edge(-side)
        keys += [Key(at + lasting, place, y, "running"), Key(at + lasting + abs(end - place) / run, end, y, "running")]
        people.append(_event_person(script, keys, 0))
    _event(script, "fight", at, min(at + lasting, script.seconds), people)


def intrusion(script: Script, at: float) -> None:
    """Somebody comes along, crosses (or climbs) into the marked zone, stays a while and leaves."""
    zone = script.layout.zone
    direction = script.sign()
    entry_x = script.between(zone.x0 + 0.1, zone.x1 - 0.1)
    outside = script.walk_y()
    inside_y = script.between(zone.y0 + 0.35 * (zone.y1 - zone.y0), zone.y1 - 0.2 * (zone.y1 - zone.y0))
    speed = script.walking_speed(outside) * script.pace
    edge_y = zone.y1 if outside > zone.y1 else zone.y0 if outside < zone.y0 else outside
    cross = at - abs(outside - edge_y) / max(speed, 1e-3)
    keys = script.walk_in(entry_x, outside, cross, direction, speed)
    keys.append(Key(cross, entry_x, outside, "walking"))
    if zone.fence:
        keys += [
            Key(at, entry_x, edge_y, "climbing", 0.0),
            Key(at + 0.8, entry_x, (edge_y + inside_y) / 2, "climbing", 0.3),
        ]
        keys.append(Key(at + 1.6, entry_x, inside_y, "walking"))
    else:
        keys += [Key(at, entry_x, edge_y, "walking"), Key(at + 1.2, entry_x, inside_y, "walking")]
    to_x = script.between(zone.x0 + 0.08, zone.x1 - 0.08)
    arrived = at + 1.6 + abs(to_x - entry_x) / speed
    leave = max(arrived, at + 3) + script.between(3, 7)
    keys += [Key(arrived, to_x, inside_y, "standing"), Key(leave, to_x, inside_y, "walking")]
    out = leave + abs(outside - inside_y) / speed + 0.3
    keys.append(Key(out, to_x, outside, "walking"))
    keys += script.walk_out(to_x, outside, out + 0.01, direction, speed)
    _event(script, "intrusion", at, min(out, script.seconds), [_event_person(script, keys, 0)])


def left_object(script: Script, at: float) -> None:
    """Somebody with a bag stops, puts it down and walks away without it."""
    x, y = script.spot(margin=0.35)
    direction, speed = script.sign(), script.walking_speed(y) * script.pace
    down = at - script.between(0.8, 1.6)
    keys = [*script.walk_in(x, y, down - 0.8, direction, speed), Key(down - 0.8, x, y, "crouching")]
    keys += [Key(down, x, y, "standing"), *script.walk_out(x, y, at, direction, speed)]
    owner = _event_person(script, keys, 0, carries=(keys[0].t, down))
    bag_x = x + 0.12 * script.layout.size(y) * direction
    bag = script.add("bag", [Key(down, bag_x, y, "attended"), Key(at, bag_x, y, "left"),
                             Key(script.seconds + 1, bag_x, y, "left")],
                     form=str(script.rng.choice(["case", "box", "sack"])), contrast=script.contrast,
                     color=str(script.rng.choice(["black", "red", "blue", "yellow"])))  # fmt: skip
    _event(script, "left_object", at, script.seconds, [owner, bag])


def stopped_vehicle(script: Script, at: float) -> None:
    """A vehicle comes along its lane, stops there and stands (to the end, or for 12 s and more)."""
    near = script.chance(0.5)
    direction = 1 if near else -1
    form = str(script.rng.choice(["car", "car", "van"]))
    start, end = script.lane_ends(direction, form, near)
    x = script.between(0.45, ASPECT - 0.45)
    speed = script.between(0.3, 0.6) * script.pace
    slow_x = x - direction * 0.15
    arrive = at - 0.15 / (0.5 * speed)
    keys = [
        script.lane_key(arrive - abs(slow_x - start) / speed, start, near, "driving"),
        script.lane_key(arrive, slow_x, near, "driving"),
        script.lane_key(at, x, near, "stopped"),
    ]
    leave = script.seconds + 1 if script.chance(0.7) else at + script.between(12, 16)
    keys.append(script.lane_key(leave, x, near, "driving"))
    if leave < script.seconds:
        keys.append(script.lane_key(leave + abs(end - x) / speed, end, near, "driving"))
    actor = script.add("vehicle", keys, form=form, facing=direction, contrast=script.contrast)
    _event(script, "stopped_vehicle", at, min(leave, script.seconds), [actor])


def wrong_way(script: Script, at: float) -> None:
    """A vehicle drives on a lane against its direction."""
    near = script.chance(0.5)
    direction = -1 if near else 1
    form = script.vehicle_form()
    start, end = script.lane_ends(direction, form, near)
    speed = script.between(0.28, 0.45) * script.pace
    actor = script.drive_through(at, near=near, direction=direction, speed=speed, form=form, contrast=script.contrast)
    _event(script, "wrong_way", at, min(at + abs(end - start) / speed, script.seconds), [actor])


def _event_person(script: Script, keys: list[Key], facing: int, **more: object) -> Actor:
    return script.add("person", keys, facing=facing, contrast=script.contrast, **more)


def _event(script: Script, kind: str, start: float, end: float, actors: list[Actor]) -> None:
    script.events.append(SceneEvent(kind, round(start, 3), round(end, 3), tuple(actor.id for actor in actors)))


EVENTS: dict[str, Callable[[Script, float], None]] = {
    "fall": fall,
    "fight": fight,
    "intrusion": intrusion,
    "left_object": left_object,
    "stopped_vehicle": stopped_vehicle,
    "wrong_way": wrong_way,
}
