"""Alerting's part of traces: from an answer to the alert that it became."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.tracing.spans import Spans, trace_id
from cluster.types import Answer

ANSWERS = 4096
"""Traced answers that may become alerts, the newest of each camera and question."""


class AlertTraces:
    """On one event loop.

    Args:
        spans: of the process.
        clock: Unix seconds.
    """

    def __init__(self, spans: Spans, clock: Callable[[], float] = time.time) -> None:
        self._spans, self._clock = spans, clock
        self._answers: dict[tuple[str, str], tuple[str, float]] = {}

    def took(self, answer: Answer) -> None:
        """An answer came; an alert that follows before the next one is about it."""
        key = (answer.stream, answer.question)
        self._answers.pop(key, None)
        if answer.trace:
            self._answers[key] = (answer.trace, self._clock())
            if len(self._answers) > ANSWERS:
                del self._answers[next(iter(self._answers))]

    def alerted(self, camera: str, question: str, event: str) -> str:
        """An event of an incident is on its way to the sinks; returns its trace id, empty where it is not traced."""
        found = self._answers.pop((camera, question), None)
        if found is None:
            return ""
        parent, came_s = found
        about = {"camera": camera, "question": question, "event": event}
        return trace_id(self._spans.span("alert", came_s, self._clock(), parent, about))
