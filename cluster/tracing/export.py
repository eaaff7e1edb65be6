"""Span processor with a bounded queue and one export thread: a slow or dead collector costs nothing but spans."""

import logging
import threading
from collections import deque

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from cluster import metrics

BATCH = 256
LINGER_S = 0.5
"""Seconds to wait for a batch to fill."""

log = logging.getLogger(__name__)


class BoundedProcessor(SpanProcessor):
    """Drops, and counts, the oldest spans when the queue is full and those that the exporter gives up on.

    OpenTelemetry's batch processor drops the newest instead, and only logs it.
    """

    def __init__(self, exporter: SpanExporter, *, queue: int = 2048) -> None:
        self._exporter, self._limit, self._batch = exporter, queue, min(BATCH, queue)
        self._waiting: deque[ReadableSpan] = deque()
        self._wake = threading.Condition()
        self._closing = False
        # The exporter logs every failed batch; here they are counted, and logged once per outage.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span; never blocks."""
        with self._wake:
            if self._closing:
                metrics.spans.labels("dropped").inc()
                return
            self._waiting.append(span)
            if len(self._waiting) > self._limit:
                self._waiting.popleft()
                metrics.spans.labels("dropped").inc()
            if len(self._waiting) >= self._batch:
                self._wake.notify()

    def close(self, timeout_s: float) -> None:
        """Export for at most ``timeout_s``; the rest is dropped and counted. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self._wake:
            metrics.spans.labels("dropped").inc(len(self._waiting))
            self._waiting.clear()
        # Interrupts an export that waits for its collector.
        self._exporter.shutdown()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or len(self._waiting) >= self._batch, LINGER_S)
                batch = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
                if not batch and self._closing:
                    return
            if batch:
                self._export(batch)

    def _export(self, batch: list[ReadableSpan]) -> None:
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:
            log.debug("an export failed", exc_info=True)
            taken = False
        metrics.spans.labels("exported" if taken else "dropped").inc(len(batch))
        if not taken and not self._failing:
            log.warning("the trace collector accepts no spans; they are dropped until it does")
        elif taken and self._failing:
            log.info("the trace collector is back")
        self._failing = not taken
