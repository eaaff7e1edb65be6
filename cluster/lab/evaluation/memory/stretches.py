"""Short stretches of life for long footage: a few people, a few vehicles one after another, and then nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.lab.scenes.actors import Actor
from cluster.lab.scenes.distractors import DISTRACTORS, passer_by
from cluster.lab.scenes.layout import ASPECT
from cluster.lab.scenes.script import Script
from cluster.lab.scenes.vocabulary import SceneEvent

# What people do. Nothing that is always there, and no vehicle: what is said of those must be certain. Nobody who runs
# through either: one near the camera is gone before two seconds, and so was never "seen".
_PEOPLE = ("crouch", "talk", "skirt_zone", "waits_with_bag")
# So long does the slowest take to where something happens.
_WALK_IN_S = 16.0
# Of a vehicle's centre, as in cluster.lab.scenes.questions: nearer to the edge it does not count as seen.
_EDGE = 0.02
_STEP_S = 0.25


@dataclass(frozen=True, slots=True)
class Drive:
    """A vehicle of a colour that comes through, or stops on its lane for some seconds first."""

    color: str
    stops: bool = False


@dataclass(frozen=True, slots=True)
class Stretch:
    """Everything that moves between ``start_s`` and ``end_s``; before and after the place is empty."""

    start_s: float
    end_s: float
    actors: tuple[Actor, ...]
    events: tuple[SceneEvent, ...]

    def moved(self, start_s: float, first_id: int) -> Stretch:
        """The same, beginning at ``start_s``, its actors numbered from ``first_id``."""
        by = start_s - self.start_s
        actors = tuple(_later(actor, by, first_id) for actor in self.actors)
        events = tuple(
            SceneEvent(
                event.kind,
                round(event.start_s + by, 3),
                round(event.end_s + by, 3),
                tuple(number + first_id for number in event.actors),
            )
            for event in self.events
        )
        return Stretch(start_s, self.end_s + by, actors, events)


def write_stretch(script: Script, drives: Sequence[Drive], people: int) -> Stretch:
    """Write a stretch into an empty script.

    Args:
        script: of the place; its length does not matter.
        drives: the vehicles, in order. No two are there at once, so none hides another or drives through it.
        people: how many times somebody (or a pair, or a group) comes. With ``drives`` empty at least 1.
    """
    for _ in range(people):
        at = script.between(0, 8)
        if script.chance(0.5):
            passer_by(script, at)
        else:
            DISTRACTORS[str(script.rng.choice(_PEOPLE))](script, at + _WALK_IN_S)
    at = script.between(0, 12)
    for drive in drives:
        at = _drive(script, drive, at) + script.between(1, 4)
    keys = [key for actor in script.actors for key in actor.keys]
    return Stretch(min(key.t for key in keys), max(key.t for key in keys), tuple(script.actors), tuple(script.events))


def seen_span(actor: Actor) -> tuple[float, float] | None:
    """When an actor is in the picture, from first to last; None for one that never is."""
    first: float | None = None
    last = second = actor.keys[0].t
    while second <= actor.keys[-1].t:
        place = actor.place(second)
        if place is not None and _EDGE < place.x < ASPECT - _EDGE:
            first = second if first is None else first
            last = second
        second += _STEP_S
    return None if first is None else (round(first, 3), round(last, 3))


def _drive(script: Script, drive: Drive, at: float) -> float:
    """Write one vehicle that enters at ``at``; when it is gone."""
    near = script.chance(0.5)
    direction = 1 if near else -1
    speed = script.between(0.28, 0.5)
    if not drive.stops:
        actor = script.drive_through(at, near=near, direction=direction, speed=speed, color=drive.color)
        return actor.keys[-1].t
    form = str(script.rng.choice(["car", "car", "van"]))
    start, end = script.lane_ends(direction, form, near)
    x = script.between(0.45, ASPECT - 0.45)
    stop = at + abs(x - start) / speed
    leave = stop + script.between(8, 14)
    gone = leave + abs(end - x) / speed
    keys = [
        script.lane_key(at, start, near, "driving"),
        script.lane_key(stop, x, near, "stopped"),
        script.lane_key(leave, x, near, "driving"),
        script.lane_key(gone, end, near, "driving"),
    ]
    actor = script.add("vehicle", keys, form=form, facing=direction, color=drive.color)
    script.events.append(SceneEvent("stopped_vehicle", stop, leave, (actor.id,)))
    return gone


def _later(actor: Actor, by: float, first_id: int) -> Actor:
    carries = None if actor.carries is None else (actor.carries[0] + by, actor.carries[1] + by)
    keys = tuple(replace(key, t=key.t + by) for key in actor.keys)
    return replace(actor, id=actor.id + first_id, keys=keys, carries=carries)
