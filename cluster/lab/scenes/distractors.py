"""What goes on besides, and what looks like an event and is none."""

from __future__ import annotations

from collections.abc import Callable

from cluster.lab.scenes.actors import Key
from cluster.lab.scenes.layout import ASPECT
from cluster.lab.scenes.script import VEHICLE_SCALE, Script


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
