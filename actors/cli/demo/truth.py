"""What is true of a camera whose scene is shown again and again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.lab.report.truth import EventInterval
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.scenes.vocabulary import SceneEvent, window_label
from cluster.types import MICROSECONDS, LastAnswer


@dataclass(frozen=True, slots=True)
class LoopedTruth:
    """The events of a scene of ``round_s`` seconds that starts again at its end. Times: seconds since it began first.

    ``window_s``: length of the windows asked about.
    """

    events: tuple[SceneEvent, ...]
    round_s: float
    window_s: float

    @classmethod
    def of_clip(cls, clip: Path, window_s: float) -> LoopedTruth:
        """Read beside an encoded scene.

        Raises:
            ConfigError: there is no truth beside it.
        """
        truth = SceneTruth.load(truth_path(clip))
        return cls(truth.scene_events, truth.seconds, window_s)

    def label(self, kind: str, start_s: float, end_s: float) -> bool | None:
        """Whether a window shows an event of ``kind``; None where too little of it lies in the window to tell.

        A window over the seam holds the end of one round and the beginning of the next.
        """
        return window_label(self.between(start_s, end_s), kind, start_s, end_s)

    def labels(self, kinds: Iterable[str], start_s: float, end_s: float) -> dict[str, bool | None]:
        """The same for several kinds."""
        return {kind: self.label(kind, start_s, end_s) for kind in kinds}

    def of_answer(self, answer: LastAnswer) -> bool | None:
        """What would have been right; the answer's question is named by its kind."""
        end_s = answer.end / MICROSECONDS
        return self.label(answer.question, max(0.0, end_s - self.window_s), end_s)

    def between(self, start_s: float, end_s: float) -> list[SceneEvent]:
        """Every event of every round that overlaps ``[start_s, end_s)``, in order."""
        found = []
        for number in range(max(0, math.floor(start_s / self.round_s)), math.floor(end_s / self.round_s) + 1):
            shift = number * self.round_s
            for event in self.events:
                if event.start_s + shift < end_s and event.end_s + shift > start_s:
                    found.append(replace(event, start_s=event.start_s + shift, end_s=event.end_s + shift))
        return found

    def intervals(self, kinds: Iterable[str], start_s: float, end_s: float) -> tuple[EventInterval, ...]:
        """The same events of these kinds, as a report shows them, cut to ``[start_s, end_s]``."""
        asked = set(kinds)
        return tuple(
            EventInterval(event.kind, max(start_s, event.start_s), min(end_s, event.end_s))
            for event in self.between(start_s, end_s)
            if event.kind in asked
        )
