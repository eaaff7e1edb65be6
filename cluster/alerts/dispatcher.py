"""Delivers alerts to sinks with retries, in order per incident and independently per sink (``Dispatcher``)."""

import asyncio
import contextlib
import heapq
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from cluster import metrics
from cluster.alerts.incident import AlertEvent, Delivery
from cluster.alerts.sinks import DeliveryError, Sink
from cluster.config.alerts import RetryConfig

log = logging.getLogger(__name__)

CONCURRENCY = 8
"""Concurrent sends to one sink, at most one per incident."""

DOWN_AFTER = 3
PAUSE_S = 5.0
"""Consecutive failures after which a sink counts as down, and the longest pause between attempts while it is, unless it
asks for more. A single alert that fails backs off on its own and does not block others."""

SEND_S = 60.0
"""Hard limit of one send, in seconds, whatever timeout the sink is configured with."""


def delay_s(retry: RetryConfig, attempt: int, draw: float) -> float:
    """Backoff in seconds after failure ``attempt`` (from 1): doubles each time, minus up to half by ``draw`` (0..1)."""
    return float(min(retry.longest_s, retry.first_s * 2.0 ** min(attempt - 1, 32)) * (1.0 - 0.5 * draw))


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """Queue and counters of one sink since the process started. ``failures``: failed attempts; ``dead``: dead letters;
    ``dropped``: from a full queue; ``trouble``: last error, empty while the sink accepts alerts."""

    waiting: int
    delivered: int
    failures: int
    dead: int
    trouble: str
    dropped: int = 0
    kind: str = ""


LEAST_FREE_BYTES = 5 * 10**9
"""Free space below which :attr:`Outbox.disk` warns: about half the default ``clips.max_bytes``, filled within days."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """Status of sinks by name, and of the disk; see ``OutboxStatus`` in protos/sightline/v1/incidents.proto."""

    sinks: Mapping[str, SinkStatus]
    trouble: str
    unwritten: int
    trimmed: int
    lost: int
    answers_missed: int
    dead: list[Delivery]
    free_bytes: int = 0

    @property
    def disk(self) -> str:
        """Problem of the disk, or a warning that it is nearly full; empty otherwise."""
        scarce = 0 < self.free_bytes <= LEAST_FREE_BYTES
        return self.trouble or ("less than 5 GB are free; clips stop below clips.keep_free" if scarce else "")


class Dispatcher:
    """One delivery queue per sink, on one event loop. :meth:`enqueue` never waits.

    Args:
        settle: called with every delivery whose state changed, to persist it.
        most: queue limit per sink; above it the oldest alert is dropped and counted.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        settle: Callable[[Delivery], None],
        *,
        retry: RetryConfig | None = None,
        most: int = 20_000,
        seed: int | None = None,
    ) -> None:
        chance = random.Random(seed)
        self._settle = settle
        self._lanes = {
            name: _SinkQueue(name, sink, settle, retry or RetryConfig(), most, chance) for name, sink in sinks.items()
        }

    def start(self) -> list[asyncio.Task[None]]:
        """Start sending; the tasks end only by failing."""
        return [lane.start() for lane in self._lanes.values()]

    def enqueue(self, deliveries: Iterable[Delivery]) -> None:
        """Queue deliveries; those to sinks no longer configured become dead letters at once."""
        for delivery in deliveries:
            lane = self._lanes.get(delivery.sink)
            if lane is None:
                error = f"sink {delivery.sink!r} is no longer configured"
                self._settle(replace(delivery, state="dead", error=error))
            else:
                lane.enqueue(delivery)

    def revise_pending(self, change: Callable[[AlertEvent], AlertEvent | None]) -> int:
        """Replace queued events by ``change(event)``; None cancels the delivery. Returns how many were cancelled.

        A delivery in progress is not interrupted, but not retried either.
        """
        return sum(lane.revise_pending(change) for lane in self._lanes.values())

    def status(self) -> dict[str, SinkStatus]:
        return {name: lane.status() for name, lane in self._lanes.items()}

    async def stop(self) -> None:
        """Stop sending; cancelled deliveries are sent again by the next process."""
        await asyncio.gather(*(lane.stop() for lane in self._lanes.values()))


class _SinkQueue:
    """Queue of one sink: a heap of incidents by due time, and the alerts of each incident in order."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        settle: Callable[[Delivery], None],
        retry: RetryConfig,
        most: int,
        chance: random.Random,
    ) -> None:
        self._name, self._sink, self._settle, self._retry, self._most = name, sink, settle, retry, most
        self._chance = chance
        self._queues: dict[str, deque[Delivery]] = {}
        self._due: list[tuple[float, int, str]] = []
        self._numbers = 0
        self._held = 0
        self._busy: set[str] = set()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[None] | None = None
        self._delivered = self._failures = self._dead = self._dropped = 0
        self._in_a_row = 0
        self._resume_s = 0.0
        self._trouble = ""

    def start(self) -> asyncio.Task[None]:
        self._main = asyncio.create_task(self._run(), name=f"alerts to {self._name}")
        return self._main

    def status(self) -> SinkStatus:
        return SinkStatus(self._held, self._delivered, self._failures, self._dead, self._trouble, self._dropped)

    def enqueue(self, delivery: Delivery) -> None:
        incident = delivery.event.incident.id
        queue = self._queues.get(incident)
        if queue is None:
            queue = self._queues[incident] = deque()
            self._schedule(incident, 0.0)
        queue.append(delivery)
        self._held += 1
        if self._held > self._most:
            self._drop_oldest()

    def revise_pending(self, change: Callable[[AlertEvent], AlertEvent | None]) -> int:
        cancelled = 0
        for incident, queue in list(self._queues.items()):
            kept = [(each, change(each.event)) for each in queue]
            queue.clear()
            queue.extend(replace(each, event=event) for each, event in kept if event is not None)
            cancelled += len(kept) - len(queue)
            if not queue and incident not in self._busy:
                del self._queues[incident]
        self._held -= cancelled
        return cancelled

    async def stop(self) -> None:
        tasks = [task for task in (self._main, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sink.close()

    # -- inside ---------------------------------------------------------------------------------
    def _schedule(self, incident: str, due_s: float) -> None:
        self._numbers += 1
        heapq.heappush(self._due, (due_s, self._numbers, incident))
        if len(self._due) > 2 * len(self._queues) + CONCURRENCY:
            # Dropped incidents: while the sink is down and the queue full, none of them would ever be the next one due.
            self._due = list({each[2]: each for each in self._due if each[2] in self._queues}.values())
            heapq.heapify(self._due)
        self._changed.set()

    def _drop_oldest(self) -> None:
        incident = next((name for name in self._queues if name not in self._busy), None)
        if incident is None:
            return
        queue = self._queues[incident]
        queue.popleft()
        self._held -= 1
        self._dropped += 1
        if not queue:
            del self._queues[incident]

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            wait_s = self._launch()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    def _launch(self) -> float | None:
        """Start due deliveries; returns seconds until the next one is due, None: wait for a change."""
        now_s = time.monotonic()
        down = self._in_a_row >= DOWN_AFTER
        if down and now_s < self._resume_s:
            return self._resume_s - now_s if self._due else None
        while self._due and len(self._busy) < (1 if down else CONCURRENCY):
            due_s, _, incident = self._due[0]
            if due_s > now_s:
                return due_s - now_s
            heapq.heappop(self._due)
            if incident not in self._queues or incident in self._busy:
                continue
            self._busy.add(incident)
            task = asyncio.create_task(self._send(incident))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return None

    async def _send(self, incident: str) -> None:
        queue = self._queues[incident]
        if not queue:
            # All its alerts were cancelled in the meantime.
            self._busy.discard(incident)
            del self._queues[incident]
            self._changed.set()
            return
        delivery = queue[0]
        error: DeliveryError | None = None
        try:
            async with asyncio.timeout(SEND_S):
                await self._sink.send(delivery.event)
        except DeliveryError as refusal:
            error = refusal
        except TimeoutError:
            error = DeliveryError(f"sink {self._name!r} did not finish within {SEND_S:g} s", retryable=True)
        except Exception as failure:
            log.exception("sink %s", self._name)
            error = DeliveryError(f"{type(failure).__name__}: {failure}", retryable=True)
        self._busy.discard(incident)
        delivery = replace(delivery, attempts=delivery.attempts + 1, error=str(error) if error else "")
        pause_s = 0.0 if error is None else self._fail(delivery, error)
        if error is None:
            self._succeed(delivery)
        # Otherwise the delivery was cancelled while in progress.
        if queue and queue[0].event.key == delivery.event.key:
            if pause_s:
                queue[0] = replace(delivery, event=queue[0].event)
            else:
                queue.popleft()
                self._held -= 1
        else:
            pause_s = 0.0
        if queue:
            self._schedule(incident, time.monotonic() + pause_s if pause_s else 0.0)
        else:
            del self._queues[incident]
            self._changed.set()

    def _succeed(self, delivery: Delivery) -> None:
        self._delivered += 1
        metrics.alert_delivery_seconds.labels(self._name).observe(max(0.0, time.time() - delivery.event.at_s))
        if self._in_a_row >= DOWN_AFTER:
            log.info("sink %s accepts alerts again", self._name)
            # Retries deferred by the outage are due now, in order of arrival.
            self._due = [(0.0, number, name) for _, number, name in self._due]
            heapq.heapify(self._due)
        self._in_a_row, self._trouble = 0, ""
        self._settle(replace(delivery, state="delivered"))

    def _fail(self, delivery: Delivery, error: DeliveryError) -> float:
        """Record a failure; returns seconds until the retry, 0 for a dead letter."""
        self._failures += 1
        self._trouble = str(error)
        expired = time.time() - delivery.event.at_s > self._retry.give_up_s
        if error.retryable:
            # A sink that asks for a pause (Retry-After) counts as down at once.
            self._in_a_row = max(self._in_a_row + 1, DOWN_AFTER if error.after_s else 0)
            if self._in_a_row == DOWN_AFTER:
                log.warning("sink %s is down: %s", self._name, error)
            pause_s = min(PAUSE_S, delay_s(self._retry, self._in_a_row, self._chance.random()))
            self._resume_s = time.monotonic() + max(pause_s, error.after_s)
        if error.retryable and not expired:
            self._settle(delivery)
            return delay_s(self._retry, delivery.attempts, self._chance.random())
        log.error("sink %s: alert %s is now a dead letter: %s", self._name, delivery.event.key, error)
        self._dead += 1
        self._settle(replace(delivery, state="dead"))
        return 0.0
