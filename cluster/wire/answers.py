"""Fans answers and events out to watchers through bounded queues that drop the oldest; the ``Results`` servicer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Generic, NamedTuple, TypeVar

import grpc.aio
from sightline.v1 import results_pb2, results_pb2_grpc

from cluster.security.limits import ConcurrencyLimit
from cluster.security.roles import current_principal
from cluster.types import Answer
from cluster.wire.convert import answer_to_proto

T = TypeVar("T")

RECENT_S = 60.0
"""Age, in seconds, up to which items are replayed to watchers who ask for recent ones."""
RECENT_ANSWERS = 20_000
"""Maximum recent answers kept: 300 per second, about 10 MB."""


AT_ONCE = 200
"""Items processed before yielding to the event loop."""
REST, MOST_REST_S = 4.0, 10.0


def poll_pause_s(poll_s: float, took_s: float) -> float:
    """Pause between polls of all cameras: in proportion to the last poll's duration, which is load on the controller
    and grows with the number of cameras, but bounded so that one slow reply does not delay news for long."""
    return max(poll_s, min(MOST_REST_S, REST * took_s))


async def yielding(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, returning control to the event loop every ``AT_ONCE`` items."""
    for number, item in enumerate(items, 1):
        yield item
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)


class Published(NamedTuple, Generic[T]):
    """An item with its sequence ``number`` on this server and monotonic time ``at_s``."""

    number: int
    at_s: float
    item: T


class Subscription(Generic[T]):
    """One watcher's queue: an async iterator of ``(item, missed)``, where ``missed`` counts items lost before it.
    ``number``, ``at_s``: of the last item yielded; before the first, ``number`` is that after which items follow."""

    def __init__(self, hub: FanOut[T], cameras: frozenset[str], limit: int, seen: Callable[[str], bool]) -> None:
        self._hub = hub
        self._cameras = cameras
        self._seen = seen
        self._limit = limit
        self._queue: deque[tuple[Published[T], int]] = deque()
        self.number, self.at_s = 0, time.monotonic()
        self._missed = 0
        self._closed = False
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Subscription[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._hub.unsubscribe(self)

    def __aiter__(self) -> Subscription[T]:
        return self

    async def __anext__(self) -> tuple[T, int]:
        while True:
            with self._hub.lock:
                if self._queue:
                    (self.number, self.at_s, item), missed = self._queue.popleft()
                    return item, missed
                if self._closed:
                    raise StopAsyncIteration
                self._ready.clear()
            await self._ready.wait()

    def miss(self, count: int) -> None:
        """Record items lost upstream, of any camera. The hub calls this with its lock held."""
        self._missed += count

    def put(self, camera: str, item: Published[T]) -> int:
        """Enqueue an item; returns how many were evicted for it. The hub calls this with its lock held."""
        if (self._cameras and camera not in self._cameras) or not self._seen(camera):
            return 0
        lost = 0
        missed, self._missed = self._missed, 0
        if len(self._queue) >= self._limit:
            _, before = self._queue.popleft()
            lost = 1
            # The loss is reported with the next item that the watcher does get.
            missed_now = before + 1
            if self._queue:
                head, head_missed = self._queue[0]
                self._queue[0] = (head, head_missed + missed_now)
            else:
                missed += missed_now
        self._queue.append((item, missed))
        self.wake()
        return lost

    def close(self) -> None:
        """End the iterator after what is queued. The hub calls this with its lock held."""
        self._closed = True
        self.wake()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)


class FanOut(Generic[T]):
    """Publish from any thread, subscribe on an event loop. Holds at most ``limit`` items per subscriber.

    Args:
        camera_of: returns the camera of an item.
        recent: maximum items of the last ``RECENT_S`` kept for watchers who ask for them.
    """

    def __init__(self, camera_of: Callable[[T], str], *, limit: int = 256, recent: int = 0) -> None:
        self._camera_of = camera_of
        self.lock = threading.Lock()
        self._recent: deque[Published[T]] = deque(maxlen=recent)
        # Numbers differ from those of earlier processes. They are not compared with another host's clock, and are
        # microseconds, since JavaScript rounds whole numbers of more than 53 bits.
        self._began, self._began_s = time.time_ns() // 1000, time.monotonic()
        self._limit = limit
        self._subscriptions: set[Subscription[T]] = set()
        self._closed = False
        self.published = 0
        self.missed = 0

    def publish(self, items: Iterable[T], missed: int = 0) -> None:
        """Hand items to every subscriber without blocking. ``missed``: items lost upstream before these."""
        with self.lock:
            self.missed += missed
            for subscription in self._subscriptions if missed else ():
                subscription.miss(missed)
            now_s = time.monotonic()
            while self._recent and self._recent[0].at_s < now_s - RECENT_S:
                self._recent.popleft()
            for item in items:
                camera = self._camera_of(item)
                self.published += 1
                published = Published(self._began + self.published, now_s, item)
                self._recent.append(published)
                for subscription in self._subscriptions:
                    self.missed += subscription.put(camera, published)

    def forget(self, gone: Callable[[str], bool], ago_s: float = 0.0) -> None:
        """Drop recent items, older than ``ago_s`` seconds, of cameras that are ``gone``."""
        with self.lock:
            before_s = time.monotonic() - ago_s
            kept = (each for each in self._recent if each.at_s > before_s or not gone(self._camera_of(each.item)))
            self._recent = deque(kept, maxlen=self._recent.maxlen)

    def subscribe(
        self,
        cameras: Collection[str] = (),
        *,
        limit: int | None = None,
        seen: Callable[[str], bool] = lambda _: True,
        recent: bool = False,
        after: int = 0,
        watching_s: float = 0.0,
    ) -> Subscription[T]:
        """Subscribe to items of ``cameras`` (empty: all) that are ``seen``, from now on; a context manager.

        ``recent``: start with those of the last ``RECENT_S``. ``after``: start after the item of this number, or with
        the first item if this process began within the last ``watching_s``; items no longer kept count as missed."""
        with self.lock:
            newest, now_s = self._began + self.published, time.monotonic()
            resumes = self._began <= after <= newest
            if resumes or now_s - self._began_s < watching_s:
                number = after if resumes else self._began
                before = [each for each in self._recent if each.number > number]
                lost = newest - number - len(before)
            else:
                before = [each for each in self._recent if each.at_s >= now_s - RECENT_S] if recent else []
                number, lost = before[0].number - 1 if before else newest, 0
            subscription = Subscription(self, frozenset(cameras), (limit or self._limit) + len(before), seen)
            subscription.number = number
            subscription.miss(lost)
            for each in before:
                subscription.put(self._camera_of(each.item), each)
            self._subscriptions.add(subscription)
            if self._closed:
                subscription.close()
            return subscription

    def unsubscribe(self, subscription: Subscription[T]) -> None:
        with self.lock:
            self._subscriptions.discard(subscription)
            subscription.close()

    def close(self) -> None:
        """End every subscription after what it has queued."""
        with self.lock:
            self._closed = True
            for subscription in self._subscriptions:
                subscription.close()


NUMBER = "number"
"""Initial metadata key of ``Watch``: number of the answer before the first."""


class AnswerHub(FanOut[Answer]):
    """Fans out answers by camera."""

    def __init__(self, **limits: int) -> None:
        super().__init__(lambda answer: answer.stream, **limits)


class ResultsServicer(results_pb2_grpc.ResultsServicer):
    """Serves ``Watch`` from a hub. A slow client fills only its own queue, and loses the oldest answers."""

    def __init__(self, hub: AnswerHub, *, most: int = 1024) -> None:
        self._hub, self._places = hub, ConcurrencyLimit(most, "clients watch already; close one of them")

    async def Watch(self, request: results_pb2.WatchRequest, context: grpc.aio.ServicerContext) -> None:
        """See protos/sightline/v1/results.proto; initial metadata confirms the subscription."""
        wanted = {name: getattr(request, name) for name in ("recent", "after", "watching_s")}
        with (
            self._places.taken(),
            self._hub.subscribe(request.cameras, seen=current_principal().sees, **wanted) as subscription,
        ):
            await context.send_initial_metadata(((NUMBER, str(subscription.number)),))
            async for answer, missed in subscription:
                waited_s = time.monotonic() - subscription.at_s
                await context.write(answer_to_proto(answer, missed, subscription.number, waited_s))
