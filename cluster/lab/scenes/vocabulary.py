"""Kinds of events, objects and states, and the label of a window."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")

EVENT_KINDS = ("fall", "fight", "intrusion", "left_object", "stopped_vehicle", "wrong_way")

PERSON_STATES = ("walking", "running", "standing", "crouching", "sitting", "lying", "fighting", "climbing")

VEHICLE_STATES = ("driving", "stopped", "parked")

BAG_STATES = ("left", "attended", "furniture")

STATES = (*PERSON_STATES, *VEHICLE_STATES, *BAG_STATES)

OBJECT_KINDS = ("person", "vehicle", "bag")

LANES = ("far", "near")

# Seconds of an event that a window must contain to be positive, if not the default.
_NEEDED_S = {"left_object": 4.0, "stopped_vehicle": 5.0, "wrong_way": 3.5}
_DEFAULT_NEEDED_S = 3.0


@dataclass(frozen=True, slots=True)
class SceneEvent:
    """An event worth an alert, from ``start_s`` to ``end_s``; ``actors``: object ids."""

    kind: str
    start_s: float
    end_s: float
    actors: tuple[int, ...]


def window_label(events: Iterable[SceneEvent], kind: str, start_s: float, end_s: float) -> bool | None:
    """Whether window ``[start_s, end_s)`` shows an event of ``kind``.

    None if undecidable: too little of the event lies in the window, or (for a left object) the window opens too late to
    show the owner leaving, and shows only a bag.
    """
    label: bool | None = False
    for event in events:
        if event.kind != kind:
            continue
        overlap = min(end_s, event.end_s) - max(start_s, event.start_s)
        if overlap <= 0 and not (kind == "left_object" and event.start_s < start_s):
            continue
        needed = min(_NEEDED_S.get(kind, _DEFAULT_NEEDED_S), 0.7 * (event.end_s - event.start_s))
        unseen = kind == "left_object" and event.start_s < start_s + 2.0
        if overlap >= needed and not unseen:
            return True
        label = None
    return label
