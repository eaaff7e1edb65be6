"""A decoder's part of traces: which stride of a camera's time is traced, and what became of its frames here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.tracing.spans import Spans, Value
from cluster.types import MICROSECONDS, FrameSample, FrameTrace


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """Unix seconds of the packet that completed a frame: it came, was taken up to be decoded, was decoded."""

    came_s: float
    taken_s: float
    decoded_s: float


class CameraTrace:
    """Traces of one camera, in its thread.

    Strides are counted from the camera's last fresh frame, as the engine counts its windows, so that the frames of one
    trace are those that a window brings anew.

    Args:
        spans: of the process.
        camera: name.
        ratio: share of strides that are traced, chosen by camera and stride: the same ones each time.
        clock: Unix seconds.
    """

    def __init__(self, spans: Spans, camera: str, ratio: float, clock: Callable[[], float] = time.time) -> None:
        self._spans, self._camera, self._ratio, self._clock = spans, camera, ratio, clock
        self._origin = 0
        self._stride: tuple[int, int] | None = None
        self._first = ""

    def frame(self, sample: FrameSample, stride_s: float, times: FrameTimes) -> FrameSample:
        """A frame is about to be sent: with its trace, if its stride is traced."""
        if sample.fresh:
            self._origin = sample.pts
        stride = (self._origin, (sample.pts - self._origin) // max(1, round(stride_s * MICROSECONDS)))
        if stride != self._stride:
            self._stride, self._first = stride, ""
        if not self._chosen(stride):
            return sample
        now_s = self._clock()
        about: dict[str, Value] = {"camera": self._camera, "frame": sample.index, "tokens": sample.tokens}
        frame = self._spans.span("frame", times.came_s, now_s, self._first, about)
        self._first = self._first or frame
        self._spans.span("ingest", times.came_s, times.taken_s, frame)
        self._spans.span("decode", times.taken_s, times.decoded_s, frame)
        self._spans.span("sample", times.decoded_s, now_s, frame)
        return replace(sample, trace=FrameTrace(frame, now_s))

    def _chosen(self, stride: tuple[int, int]) -> bool:
        text = f"{self._camera}/{stride[0]}/{stride[1]}"
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return drawn < self._ratio * 2**64
