"""Spans whose beginnings and ends are known afterwards, on their way to a collector."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from cluster.config.tracing import TracingConfig

_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_NANOSECONDS = 1_000_000_000

Value = str | bool | int | float


class Spans:
    """Makes the spans of one process. Every call returns at once; thread-safe.

    Args:
        process: name of the process, shown with each span.
        exporter: brings spans to a collector.
        queue: most spans that wait for it.
    """

    def __init__(self, process: str, exporter: SpanExporter, *, queue: int = 2048) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider

        from cluster.tracing.export import BoundedProcessor

        self._processor = BoundedProcessor(exporter, queue=queue)
        resource = Resource({"service.name": "sightline", "service.instance.id": process})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False, span_limits=SpanLimits())
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("sightline")

    def span(
        self, name: str, start_s: float, end_s: float, parent: str = "", about: Mapping[str, Value] | None = None
    ) -> str:
        """A span that is over, in Unix seconds; a trace of its own without ``parent``.

        Returns:
            The span as W3C's ``traceparent``, which makes others its children, here or in another process; empty when
            ``parent`` is none that can be read: what comes off the wire may be anything.
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
        """Export what waits, for so long at most; what is left is dropped and counted."""
        self._processor.close(timeout_s)


def trace_id(parent: str) -> str:
    """Of a ``traceparent``, as log lines show it; empty where there is none."""
    found = _PARENT.fullmatch(parent)
    return found[1] if found else ""


def make_spans(config: TracingConfig, process: str) -> Spans | None:
    """``None`` while tracing is off.

    Raises:
        ConfigError: the libraries are not installed.
    """
    if config.endpoint is None:
        return None
    check_tracing(config)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(
        endpoint=config.endpoint, insecure=config.endpoint.startswith("http://"), timeout=config.timeout_s
    )
    return Spans(process, exporter, queue=config.queue)


def check_tracing(config: TracingConfig) -> None:
    """Whether what a configuration asks for can be loaded.

    Raises:
        ConfigError: it cannot.
    """
    if config.endpoint is None:
        return
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError("tracing.endpoint needs OpenTelemetry's exporter; install it: pip install 'sightline[otel]'")


def _context(parent: str) -> Any:
    from opentelemetry import trace

    found = _PARENT.fullmatch(parent)
    if found is None:
        return None
    there = trace.SpanContext(
        int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(there))
