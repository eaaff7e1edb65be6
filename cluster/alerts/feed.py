"""Incident events for live subscribers, through bounded queues that drop the oldest events (``EventFeed``)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from types import TracebackType

from cluster.alerts.incident import AlertEvent
from cluster.errors import CapacityError


class Follower:
    """Async iterator of ``(event, missed)`` and context manager; ``missed`` counts events dropped before this one."""

    def __init__(self, feed: EventFeed, limit: int) -> None:
        self._feed = feed
        self._limit = limit
        self._queue: deque[AlertEvent] = deque()
        self._missed = 0
        self._ready = asyncio.Event()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.remove_follower(self)

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> tuple[AlertEvent, int]:
        while not self._queue:
            if self._feed.closed:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        missed, self._missed = self._missed, 0
        return self._queue.popleft(), missed

    def put(self, event: AlertEvent) -> None:
        if len(self._queue) >= self._limit:
            self._queue.popleft()
            self._missed += 1
        self._queue.append(event)
        self.wake()

    def wake(self) -> None:
        self._ready.set()


class EventFeed:
    """Publishes to all followers on one event loop. Memory: ``limit`` events per follower."""

    def __init__(self, *, limit: int = 256, max_followers: int = 256) -> None:
        self._limit = limit
        self._max_followers = max_followers
        self._followers: set[Follower] = set()
        self.closed = False

    def publish(self, events: Iterable[AlertEvent]) -> None:
        """Queue events for all followers without waiting."""
        for event in events:
            for follower in self._followers:
                follower.put(event)

    def follow(self) -> Follower:
        """Subscribe to events from now on.

        Raises:
            CapacityError: too many followers.
        """
        if len(self._followers) >= self._max_followers:
            raise CapacityError(f"{self._max_followers} clients follow incidents already; close one of them")
        follower = Follower(self, self._limit)
        self._followers.add(follower)
        return follower

    def remove_follower(self, follower: Follower) -> None:
        self._followers.discard(follower)

    def close(self) -> None:
        """End all followers after their queued events."""
        self.closed = True
        for follower in self._followers:
            follower.wake()
