"""``Results``: answers fan out to whoever watches, through bounded queues where the newest answers win."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from types import TracebackType

import grpc.aio
from sightline.v1 import results_pb2, results_pb2_grpc

from cluster.errors import CapacityError, SightlineError
from cluster.security.roles import current_principal
from cluster.types import Answer
from cluster.wire.convert import answer_to_proto
from cluster.wire.status import abort

SERVICE = "sightline.v1.Results"

RECENT_S = 60.0
"""Answers no older than this are sent first to watchers who ask for recent ones."""


class Subscription:
    """One watcher's queue: an async iterator of ``(answer, missed)``, ``missed`` counting answers lost before it."""

    def __init__(self, hub: AnswerHub, cameras: frozenset[str], limit: int, seen: Callable[[str], bool]) -> None:
        self._hub = hub
        self._cameras = cameras
        self._seen = seen
        self._limit = limit
        self._queue: deque[tuple[Answer, int]] = deque()
        self._missed = 0
        self._closed = False
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hub.unsubscribe(self)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> tuple[Answer, int]:
        while True:
            with self._hub.lock:
                if self._queue:
                    return self._queue.popleft()
                if self._closed:
                    raise StopAsyncIteration
                self._ready.clear()
            await self._ready.wait()

    def put(self, answer: Answer, missed: int) -> int:
        """Called by the hub under its lock; returns how many answers this one pushed out."""
        if (self._cameras and answer.stream not in self._cameras) or not self._seen(answer.stream):
            return 0
        lost = 0
        if len(self._queue) >= self._limit:
            _, before = self._queue.popleft()
            lost = 1
            # What was lost is told with the next answer the watcher does get.
            missed_now = before + 1
            if self._queue:
                head, head_missed = self._queue[0]
                self._queue[0] = (head, head_missed + missed_now)
            else:
                missed += missed_now
        self._queue.append((answer, missed))
        self.wake()
        return lost

    def close(self) -> None:
        """Called by the hub under its lock: the iterator ends after what is queued."""
        self._closed = True
        self.wake()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)


class AnswerHub:
    """Publish from any thread, subscribe on an event loop. Memory: ``limit`` answers per subscriber."""

    def __init__(self, *, limit: int = 256, max_subscribers: int = 1024, recent: int = 0) -> None:
        """Args: ``recent``: most answers of the last ``RECENT_S`` held for watchers who ask for them."""
        self.lock = threading.Lock()
        self._recent: deque[tuple[float, Answer]] = deque(maxlen=recent)
        self._limit = limit
        self._max_subscribers = max_subscribers
        self._subscriptions: set[Subscription] = set()
        self._closed = False
        self.published = 0
        self.missed = 0

    @property
    def subscribers(self) -> int:
        return len(self._subscriptions)

    def publish(self, answers: Iterable[Answer], missed: int = 0) -> None:
        """Hand answers to every subscriber; never blocks. ``missed``: answers lost on the way here, before these."""
        with self.lock:
            self.missed += missed
            now_s = time.monotonic()
            while self._recent and self._recent[0][0] < now_s - RECENT_S:
                self._recent.popleft()
            for answer in answers:
                self.published += 1
                self._recent.append((now_s, answer))
                for subscription in self._subscriptions:
                    self.missed += subscription.put(answer, missed)
                missed = 0

    def forget(self, camera: str) -> None:
        """The camera was removed: nobody gets its recent answers any more."""
        with self.lock:
            kept = [(at_s, answer) for at_s, answer in self._recent if answer.stream != camera]
            self._recent = deque(kept, maxlen=self._recent.maxlen)

    def subscribe(
        self,
        cameras: Collection[str] = (),
        *,
        limit: int | None = None,
        seen: Callable[[str], bool] = lambda _: True,
        recent: bool = False,
    ) -> Subscription:
        """Answers from now on, of ``cameras`` or (empty) of all, as far as they are ``seen``; a context manager.

        ``recent``: those of the last ``RECENT_S`` first.

        Raises:
            CapacityError: too many subscribers.
        """
        with self.lock:
            if len(self._subscriptions) >= self._max_subscribers:
                raise CapacityError(f"{self._max_subscribers} clients watch already; close one of them")
            since_s = time.monotonic() - RECENT_S
            before = [answer for at_s, answer in self._recent if at_s >= since_s] if recent else []
            subscription = Subscription(self, frozenset(cameras), (limit or self._limit) + len(before), seen)
            for answer in before:
                subscription.put(answer, 0)
            self._subscriptions.add(subscription)
            if self._closed:
                subscription.close()
            return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        with self.lock:
            self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End every subscription after what it has queued."""
        with self.lock:
            self._closed = True
            for subscription in self._subscriptions:
                subscription.close()


class ResultsServicer(results_pb2_grpc.ResultsServicer):
    """``Watch`` over a hub. A client that reads slowly loses the oldest answers; only its own queue fills."""

    def __init__(self, hub: AnswerHub) -> None:
        self._hub = hub

    async def Watch(self, request: results_pb2.WatchRequest, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        """See protos/sightline/v1/results.proto; initial metadata tells the client that it is subscribed."""
        try:
            with self._hub.subscribe(
                request.cameras, seen=current_principal().sees, recent=request.recent
            ) as subscription:
                await context.send_initial_metadata(())
                async for answer, missed in subscription:
                    await context.write(answer_to_proto(answer, missed))
        except SightlineError as error:
            await abort(context, error)
