"""Spans recorded after the fact by decoder, replica and alerting, joined to one trace per window."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError, install_hint
from cluster.types import MICROSECONDS, Answer, FrameSample, FrameTrace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from cluster.config.cluster import TracingConfig

ANSWERS = 4096
"""Maximum traced answers kept because they may become alerts: the newest per camera and question."""


class AlertTraces:
    """Alerting's part of traces. Runs on one event loop. ``clock``: Unix seconds."""

    def __init__(self, spans: Spans, clock: Callable[[], float] = time.time) -> None:
        self._spans, self._clock = spans, clock
        self._answers: dict[tuple[str, str], tuple[str, float]] = {}

    def answer_received(self, answer: Answer) -> None:
        """Record an answer; an alert before the next answer is attributed to it."""
        key = (answer.stream, answer.question)
        self._answers.pop(key, None)
        if answer.trace:
            self._answers[key] = (answer.trace, self._clock())
            if len(self._answers) > ANSWERS:
                del self._answers[next(iter(self._answers))]

    def event_queued(self, camera: str, question: str, event: str) -> str:
        """Record an incident event on its way to the sinks; returns its trace id, empty if not traced."""
        found = self._answers.pop((camera, question), None)
        if found is None:
            return ""
        parent, came_s = found
        about = {"camera": camera, "question": question, "event": event}
        return trace_id(self._spans.span("alert", came_s, self._clock(), parent, about))


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """Unix seconds of the packet that completed a frame: received, dequeued for decoding, decoded."""

    came_s: float
    taken_s: float
    decoded_s: float


class CameraTrace:
    """A decoder's part of one camera's traces, used in the camera's thread.

    Strides are counted from the camera's last fresh frame, as the engine counts windows, so that the frames of one
    trace are the new frames of one window.

    ``ratio``: share of traced strides, chosen deterministically by camera and stride; ``clock``: Unix seconds.
    """

    def __init__(self, spans: Spans, camera: str, ratio: float, clock: Callable[[], float] = time.time) -> None:
        self._spans, self._camera, self._ratio, self._clock = spans, camera, ratio, clock
        self._origin = 0
        self._stride: tuple[int, int] | None = None
        self._first = ""

    def trace_frame(self, sample: FrameSample, stride_s: float, times: FrameTimes) -> FrameSample:
        """The frame to send, with its trace context if its stride is traced."""
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


FRAMES = 64
"""Maximum traced frames per camera that wait for their window's answer."""

CAMERAS = 4096
"""Maximum cameras with traced frames; the least recently traced is evicted."""

STAGES = ("queue", "vision", "plan", "llm")


class ReplicaTraces:
    """A replica's part of traces. Thread-safe: frames arrive on the event loop, answers on the engine thread.
    ``clock``: Unix seconds."""

    def __init__(self, spans: Spans, clock: Callable[[], float] = time.time) -> None:
        self._spans, self._clock = spans, clock
        self._lock = threading.Lock()
        # (pts, parent) of each frame.
        self._frames: dict[str, deque[tuple[int, str]]] = {}

    def frame_received(self, sample: FrameSample) -> None:
        if sample.trace is None:
            return
        self._spans.span("send", sample.trace.sent_s, self._clock(), sample.trace.parent, {"camera": sample.stream})
        with self._lock:
            frames = self._frames.pop(sample.stream, None) or deque(maxlen=FRAMES)
            if sample.fresh:
                frames.clear()
            frames.append((sample.pts, sample.trace.parent))
            self._frames[sample.stream] = frames
            while len(self._frames) > CAMERAS:
                del self._frames[next(iter(self._frames))]

    def window_answered(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers of one window, with the trace of its newest traced frame if it has one."""
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
            # Laid out in sequence; the remaining time went to the batch's other windows.
            at_s = now_s - timing.latency_s
            for stage in STAGES:
                until_s = at_s + getattr(timing, f"{stage}_s")
                self._spans.span(stage, at_s, until_s, answer)
                at_s = until_s
        return [replace(each, trace=answer) for each in answers]

    def newest_trace_id(self, camera: str) -> str:
        """Trace id of the newest traced frame that waits for an answer, for logs; empty if none."""
        with self._lock:
            frames = self._frames.get(camera)
            return trace_id(frames[-1][1]) if frames else ""

    def remove_camera(self, camera: str) -> None:
        with self._lock:
            self._frames.pop(camera, None)

    def _parent(self, camera: str, end: int) -> str:
        """Take the newest traced frame before a window's end, and discard older ones."""
        with self._lock:
            frames = self._frames.get(camera)
            found = ""
            while frames and frames[0][0] < end:
                _, found = frames.popleft()
            if frames is not None and not frames:
                del self._frames[camera]
            return found


_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_NANOSECONDS = 1_000_000_000

Value = str | bool | int | float


class Spans:
    """Creates the spans of one process. Never blocks; thread-safe.

    ``process``: its name, an attribute of each span; ``exporter``: sends spans to a collector; ``queue``: maximum spans
    waiting for it.
    """

    def __init__(self, process: str, exporter: SpanExporter, *, queue: int = 2048) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        from cluster.tracing.export import BoundedProcessor

        self._processor = BoundedProcessor(exporter, queue=queue)
        resource = Resource({"service.name": "sightline", "service.instance.id": process})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("sightline")

    def span(
        self, name: str, start_s: float, end_s: float, parent: str = "", about: Mapping[str, Value] | None = None
    ) -> str:
        """Record a finished span, times in Unix seconds; without ``parent`` it starts a trace.

        Returns:
            The span as W3C ``traceparent``, for children in any process; empty if ``parent``, which comes from the
            network, is invalid.
        """
        from opentelemetry import trace

        context = _context(parent) if parent else trace.set_span_in_context(trace.INVALID_SPAN)
        if context is None:
            return ""
        begin = round(start_s * _NANOSECONDS)
        span = self._tracer.start_span(name, context, attributes=dict(about or {}), start_time=begin)
        span.end(max(begin, round(end_s * _NANOSECONDS)))
        made = span.get_span_context()
        return f"00-{made.trace_id:032x}-{made.span_id:016x}-{int(made.trace_flags):02x}"

    def close(self, timeout_s: float = 1.0) -> None:
        """Export for at most ``timeout_s``; the rest is dropped and counted."""
        self._processor.close(timeout_s)


def trace_id(parent: str) -> str:
    """Trace id of a ``traceparent``, for logs; empty if none."""
    found = _PARENT.fullmatch(parent)
    return found[1] if found else ""


def make_spans(config: TracingConfig, process: str) -> Spans | None:
    """Create the process's spans; ``None`` if tracing is off. Raises ``ConfigError``: the libraries are not
    installed."""
    if config.endpoint is None:
        return None
    check_tracing(config)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(
        endpoint=config.endpoint, insecure=config.endpoint.startswith("http://"), timeout=config.timeout_s
    )
    return Spans(process, exporter, queue=config.queue)


def check_tracing(config: TracingConfig) -> None:
    """Check that the configured exporter can be loaded. Raises ``ConfigError``: it cannot."""
    if config.endpoint is None:
        return
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(
            f"tracing.endpoint needs OpenTelemetry's exporter, which is not installed: {install_hint('otel')}"
        )


def _context(parent: str) -> Any:
    from opentelemetry import trace

    found = _PARENT.fullmatch(parent)
    if found is None:
        return None
    there = trace.SpanContext(
        int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(there))
