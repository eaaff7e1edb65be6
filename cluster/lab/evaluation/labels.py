"""What is true of a video and of a window of it."""

from __future__ import annotations

from cluster.lab.evaluation.datasets import LabelledVideo
from cluster.lab.scenes.vocabulary import EVENT_KINDS, SceneEvent, window_label

# Of footage whose kinds are not ours: seconds of an event, or the share of a shorter one, that a window must hold.
_NEEDED_S = 3.0
_NEEDED_SHARE = 0.7


def has_event(video: LabelledVideo, kind: str) -> bool:
    """Whether the video holds an event of this kind."""
    return any(event[0] == kind for event in video.events)


def window_truth(video: LabelledVideo, kind: str, start_s: float, end_s: float) -> bool | None:
    """Whether the window ``[start_s, end_s)`` shows the event; ``None`` where too little of it lies in the window."""
    if kind in EVENT_KINDS:
        events = [SceneEvent(name, start, end, ()) for name, start, end in video.events]
        return window_label(events, kind, start_s, end_s)
    told: bool | None = False
    for name, start, end in video.events:
        overlap = min(end_s, end) - max(start_s, start)
        if name != kind or overlap <= 0:
            continue
        if overlap >= min(_NEEDED_S, _NEEDED_SHARE * (end - start)):
            return True
        told = None
    return told
