"""The six events. Each function writes one into a script, beginning about ``at`` seconds into the scene."""

from __future__ import annotations

from collections.abc import Callable

from cluster.lab.scenes.actors import Actor, Key
from cluster.lab.scenes.layout import ASPECT
from cluster.lab.scenes.script import Script
from cluster.lab.scenes.vocabulary import SceneEvent

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
