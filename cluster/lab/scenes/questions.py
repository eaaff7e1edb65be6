"""Questions about a scene: standing questions in several wordings, and memory questions about the past."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from cluster.lab.scenes.actors import COLORS, Actor

if TYPE_CHECKING:
    from cluster.lab.scenes.actors import Scene


_PHRASINGS: dict[str, tuple[str, ...]] = {
    "fall": (
        "Is someone lying on the ground after a fall?",
        "Did a person fall and stay down?",
        "Has anyone collapsed?",
        "Is a fallen person on the ground?",
    ),
    "fight": (
        "Are people fighting?",
        "Is there a fight between two people?",
        "Do you see a violent fight?",
        "Is someone hitting another person?",
    ),
    "intrusion": (
        "Is someone inside the marked zone?",
        "Did anyone enter the marked area?",
        "Has a person climbed or crossed into the restricted zone?",
        "Is the restricted area entered by someone?",
    ),
    "left_object": (
        "Was an object left behind?",
        "Did someone leave a bag behind?",
        "Is there an abandoned bag?",
        "Has a person walked away from their luggage?",
    ),
    "stopped_vehicle": (
        "Did a vehicle stop in the road?",
        "Is a vehicle standing on the road?",
        "Has a car stopped in a lane?",
        "Is a stopped vehicle blocking the lane?",
    ),
    "wrong_way": (
        "Is a vehicle driving the wrong way?",
        "Did a vehicle drive against the traffic?",
        "Is a car moving in the wrong direction?",
        "Has a wrong way driver passed?",
    ),
}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")


def standing_question(kind: str) -> str:
    """Default wording for a kind of event. Raises ``KeyError``: unknown kind."""
    return _PHRASINGS[kind][0]


def phrasings(kind: str) -> tuple[str, ...]:
    """All wordings used to train the demo model, the default first."""
    return _PHRASINGS[kind]


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """A question about everything seen up to ``at_s`` seconds; ``answer`` is one word."""

    text: str
    answer: str
    at_s: float


def memory_questions(scene: Scene, at_s: float | None = None) -> list[MemoryQuestion]:
    """Questions asked at ``at_s`` (default: the scene's end) about the past, in every wording, with their answers.

    Only questions with an unambiguous answer: an object counts once its centre was visible for two seconds.
    """
    end = scene.seconds if at_s is None else at_s
    persons = [span for actor in scene.actors if actor.kind == "person" and (span := _seen(actor, end))]
    there = [(span, actor) for actor in scene.actors if actor.kind == "vehicle" and (span := _seen(actor, end))]
    vehicles = [(span, actor) for span, actor in there if actor.keys[0].state != "parked"]
    asked: list[tuple[str, str]] = []
    for text in ("How many people were seen?", "How many people crossed the picture?"):
        asked.append((text, NUMBERS[min(len(persons), len(NUMBERS) - 1)]))
    for text, count in (("How many vehicles passed?", len(vehicles)), ("How many vehicles were seen?", len(there))):
        asked.append((text, NUMBERS[min(count, len(NUMBERS) - 1)]))
    # Ask about every colour: asking only about those that were seen would give the answer away.
    for color in sorted(COLORS):
        passed = any(actor.color == color for _, actor in vehicles)
        seen = any(actor.color == color for _, actor in there)
        stopped = any(
            actor.color == color and any(key.state == "stopped" and key.t < end - 2 for key in actor.keys)
            for _, actor in vehicles
        )
        asked.append((f"Did a {color} vehicle pass earlier?", "yes" if passed else "no"))
        asked.append((f"Was there a {color} vehicle?", "yes" if seen else "no"))
        asked.append((f"Did a {color} vehicle stop here earlier?", "yes" if stopped else "no"))
    # With a parked vehicle in view from the start, "first" would be ambiguous.
    if persons and vehicles and len(there) == len(vehicles):
        first_person, first_vehicle = min(persons), min(span for span, _ in vehicles)
        if abs(first_person - first_vehicle) > 1.5:
            word = "person" if first_person < first_vehicle else "vehicle"
            asked.append(("Which came first, a person or a vehicle?", word))
            asked.append(("What was seen first, a vehicle or a person?", word))
    return [MemoryQuestion(text, answer, end) for text, answer in asked]


def _seen(actor: Actor, end: float) -> float | None:
    """Time at which the actor had been visible for two seconds; None if not before ``end``."""
    # Four instants stand for half a second each.
    times = actor.visible_times(max(0.0, actor.keys[0].t), 0.5, end)
    return next((second for second in islice(times, 3, 4) if second < end), None)
