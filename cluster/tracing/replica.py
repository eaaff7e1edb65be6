"""A replica's part of traces: from a frame's arrival to the answer of its window."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.tracing.spans import Spans, Value, trace_id
from cluster.types import Answer, FrameSample

FRAMES = 64
"""Traced frames of a camera that wait for their window's answer."""

CAMERAS = 4096
"""Cameras with traced frames; those traced longest ago are forgotten beyond it."""

STAGES = ("queue", "vision", "plan", "llm")


@dataclass(frozen=True, slots=True)
class _Frame:
    pts: int
    parent: str


class ReplicaTraces:
    """Thread-safe: frames come on the event loop, answers on the engine's thread.

    Args:
        spans: of the process.
        clock: Unix seconds.
    """

    def __init__(self, spans: Spans, clock: Callable[[], float] = time.time) -> None:
        self._spans, self._clock = spans, clock
        self._lock = threading.Lock()
        self._frames: dict[str, deque[_Frame]] = {}

    def frame(self, sample: FrameSample) -> None:
        """A frame came off the wire."""
        if sample.trace is None:
            return
        self._spans.span("send", sample.trace.sent_s, self._clock(), sample.trace.parent, {"camera": sample.stream})
        with self._lock:
            frames = self._frames.pop(sample.stream, None) or deque(maxlen=FRAMES)
            if sample.fresh:
                frames.clear()
            frames.append(_Frame(sample.pts, sample.trace.parent))
            self._frames[sample.stream] = frames
            while len(self._frames) > CAMERAS:
                del self._frames[next(iter(self._frames))]

    def answered(self, answers: Sequence[Answer]) -> list[Answer]:
        """All answers of one window, with the trace of its newest traced frame if it has one."""
        first = answers[0]
        parent = self._parent(first.stream, first.end)
        if not parent:
            return list(answers)
        now_s, timing, tokens = self._clock(), first.timing, first.tokens
        about: dict[str, Value] = {
            "camera": first.stream,
            "window": first.window,
            "gated": first.gated,
            "tokens.kept": tokens.kept,
            "tokens.reused": tokens.reused,
            "tokens.computed": tokens.computed,
        }
        answer = self._spans.span("answer", now_s - timing.latency_s, now_s, parent, about)
        if not first.gated:
            # The stages one after the other; what lies between them is the batch's other windows.
            at_s = now_s - timing.latency_s
            for stage in STAGES:
                until_s = at_s + getattr(timing, f"{stage}_s")
                self._spans.span(stage, at_s, until_s, answer)
                at_s = until_s
        return [replace(each, trace=answer) for each in answers]

    def newest(self, camera: str) -> str:
        """Trace id of the newest traced frame that waits for an answer, for log lines; empty where there is none."""
        with self._lock:
            frames = self._frames.get(camera)
            return trace_id(frames[-1].parent) if frames else ""

    def forget(self, camera: str) -> None:
        """The camera left."""
        with self._lock:
            self._frames.pop(camera, None)

    def _parent(self, camera: str, end: int) -> str:
        """The newest traced frame before a window's end; older ones belong to windows that were answered without."""
        with self._lock:
            frames = self._frames.get(camera)
            found = ""
            while frames and frames[0].pts < end:
                found = frames.popleft().parent
            if frames is not None and not frames:
                del self._frames[camera]
            return found
