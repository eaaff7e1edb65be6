"""Live events for browsers: made once, handed to every browser that may see them, bounded for each."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster import metrics
from cluster.errors import CapacityError
from cluster.gateway.http.plain import plain

QUEUE = 512
"""Answers and incidents that wait for one browser."""
MOST_READERS = 256


@dataclass(frozen=True, slots=True)
class Event:
    """One event as it is sent; ``camera`` is whom it is about."""

    kind: str
    camera: str
    data: bytes

    @classmethod
    def of(cls, kind: str, camera: str, body: Any) -> Event:
        text = json.dumps(plain(body), ensure_ascii=False, separators=(",", ":"))
        # JSON has no line ends outside of text, where they are escaped: one data line is enough.
        return cls(kind, camera, f"event: {kind}\ndata: {text}\n\n".encode("utf-8", "replace"))


class Reader:
    """One browser's events: of cameras only the newest status each, of the rest the newest ``limit``."""

    def __init__(self, wants: Callable[[str], bool], limit: int) -> None:
        self._wants = wants
        self._limit = limit
        self._events: deque[Event] = deque()
        self._cameras: dict[str, Event] = {}
        self._ready = asyncio.Event()
        self._closed = False
        self.missed = 0

    def put(self, event: Event) -> None:
        """Never waits; pushes the oldest out where there is no room."""
        if not self._wants(event.camera):
            return
        if event.kind == "camera":
            self._cameras[event.camera] = event
        else:
            if event.kind == "removed":
                self._cameras.pop(event.camera, None)
            if len(self._events) >= self._limit:
                self._events.popleft()
                self.missed += 1
                metrics.http_events_missed.inc()
            self._events.append(event)
        self._ready.set()

    def close(self) -> None:
        self._closed = True
        self._ready.set()

    async def take(self, timeout_s: float) -> bytes | None:
        """All that waits, as one piece; empty after ``timeout_s`` without any, None when there will be no more."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return b""
        self._ready.clear()
        if self._closed:
            return None
        missed, self.missed = self.missed, 0
        told = [Event.of("missed", "", {"events": missed})] if missed else []
        events = [*told, *self._events, *self._cameras.values()]
        self._events.clear()
        self._cameras.clear()
        return b"".join(event.data for event in events)


class Feed:
    """Hands events to readers. Used on one event loop."""

    def __init__(self, *, limit: int = QUEUE, most: int = MOST_READERS) -> None:
        self._limit, self._most = limit, most
        self._readers: set[Reader] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._readers)

    def put(self, event: Event) -> None:
        """For everybody who wants it."""
        for reader in self._readers:
            reader.put(event)

    @contextmanager
    def read(self, wants: Callable[[str], bool]) -> Iterator[Reader]:
        """Events from now on, of cameras that are wanted.

        Raises:
            CapacityError: too many read already.
        """
        if len(self._readers) >= self._most:
            raise CapacityError(f"{self._most} pages follow this gateway already; close one of them")
        reader = Reader(wants, self._limit)
        if self._closed:
            reader.close()
        self._readers.add(reader)
        metrics.http_readers.set(len(self._readers))
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            metrics.http_readers.set(len(self._readers))

    def close(self) -> None:
        """End every reader."""
        self._closed = True
        for reader in self._readers:
            reader.close()
