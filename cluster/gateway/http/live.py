"""Watches cameras, answers and incidents for the console: score history and live events (``Live``)."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Self, TypeVar

from sightline.v1 import incidents_pb2

from cluster import metrics
from cluster.alerts.incident import AlertEvent
from cluster.errors import SightlineError
from cluster.gateway.directory import Directory
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.replies import encoded
from cluster.security.limits import ConcurrencyLimit
from cluster.types import MICROSECONDS, Answer, CameraStatus
from cluster.types.reports import ReplicaStatus
from cluster.wire.answers import AnswerHub, poll_pause_s, yielding
from cluster.wire.mapping import from_message

T = TypeVar("T")

KEPT = 120
"""Scores kept per question, and rung changes per camera."""
MOST_QUESTIONS = 64
MOST_CAMERAS = 20_000

_WIDTH = 4


class Ring:
    """The last ``kept`` scores, as rows (Unix time of the window's end, score, flags, seconds of video) of 32 bytes."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._data = array("d")

    def add(self, at_s: float, score: float, positive: bool, gated: bool, length_s: float) -> None:
        self._data.extend((at_s, score, positive + 2.0 * gated, length_s))
        del self._data[: -_WIDTH * self._kept]

    def since(self, at_s: float) -> Ring:
        kept = Ring(self._kept)
        for row in self.rows():
            if row[0] >= at_s:
                kept.add(*row)
        return kept

    def rows(self) -> list[list[Any]]:
        """Oldest first: ``[end_unix_s, score, positive, gated, length_s]``."""
        columns = (self._data[column::_WIDTH] for column in range(_WIDTH))
        return [
            [round(at_s, 3), round(score, 4), flags % 2 == 1, flags >= 2, round(length_s, 3)]
            for at_s, score, flags, length_s in zip(*columns, strict=True)
        ]


@dataclass(slots=True)
class _Camera:
    scores: dict[str, Ring] = field(default_factory=dict)
    rungs: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=KEPT))


class History:
    """Scores and rung changes of all cameras, in memory."""

    def __init__(self) -> None:
        self._cameras: dict[str, _Camera] = {}

    def answer(self, answer: Answer, now_s: float | None = None) -> float:
        """Record an answer's score; returns the Unix time of the window's end.

        That is the arrival time of its last frame, since the camera's own clock has an arbitrary origin.
        """
        at_s = round((time.time() if now_s is None else now_s) - answer.lag_s, 3)
        camera = self._camera(answer.stream)
        if camera is None:
            return at_s
        ring = camera.scores.get(answer.question)
        if ring is None:
            if len(camera.scores) >= MOST_QUESTIONS:
                del camera.scores[next(iter(camera.scores))]
            ring = camera.scores[answer.question] = Ring()
        ring.add(at_s, answer.score, answer.positive, answer.gated, (answer.end - answer.start) / MICROSECONDS)
        return at_s

    def status(self, status: CameraStatus, now_s: float | None = None) -> None:
        """Record the camera's rung if it has changed."""
        camera = self._camera(status.name)
        if camera is not None and (not camera.rungs or camera.rungs[-1][1] != status.rung):
            at_s = time.time() if now_s is None else now_s
            camera.rungs.append((round(at_s, 3), status.rung, status.rung_reason))

    def keep(self, names: Collection[str]) -> None:
        """Drop all cameras but these."""
        for name in self._cameras.keys() - set(names):
            del self._cameras[name]

    def forget(self, name: str, before_s: float) -> None:
        """Delete a camera's scores of windows that ended before ``before_s``, Unix time."""
        camera = self._cameras.get(name, _Camera())
        camera.scores = {question: ring.since(before_s) for question, ring in camera.scores.items()}

    def body(self, name: str) -> dict[str, Any]:
        """``{"scores": {question: rows}, "rungs": [[unix_s, rung, reason], …]}``; empty for an unknown camera."""
        camera = self._cameras.get(name, _Camera())
        return {
            "scores": {question: ring.rows() for question, ring in camera.scores.items()},
            "rungs": [list(row) for row in camera.rungs],
        }

    def _camera(self, name: str) -> _Camera | None:
        camera = self._cameras.get(name)
        if camera is None and len(self._cameras) < MOST_CAMERAS:
            camera = self._cameras[name] = _Camera()
        return camera


QUEUE = 512
"""Limit of queued answers and incidents per browser."""
MOST_READERS = 256


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; ``camera``: the camera that it concerns, or empty."""

    kind: str
    camera: str
    data: bytes

    @classmethod
    def of(cls, kind: str, camera: str, body: Any) -> Self:
        # One data line is enough: compact JSON contains no raw line breaks.
        return cls(kind, camera, b"event: %s\ndata: %s\n\n" % (kind.encode(), encoded(body)))


class Reader:
    """Event queue of one browser: the newest status of each camera, the newest trouble, and the newest ``limit`` other
    events."""

    def __init__(self, wants: Callable[[str], bool], limit: int) -> None:
        self._wants = wants
        self._limit = limit
        self._events: deque[Event] = deque()
        self._cameras: dict[str, Event] = {}
        self._ready = asyncio.Event()
        self._closed = False
        self.missed = 0

    def put(self, event: Event) -> None:
        """Queue an event without waiting; drops the oldest if the queue is full."""
        if not self._wants(event.camera):
            return
        if event.kind in ("camera", "trouble"):
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
        """All queued events, concatenated; empty after ``timeout_s`` without any, None once closed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return b""
        self._ready.clear()
        if self._closed:
            return None
        missed, self.missed = self.missed, 0
        lost = [Event.of("missed", "", {"events": missed})] if missed else []
        events = [*lost, *self._events, *self._cameras.values()]
        self._events.clear()
        self._cameras.clear()
        return b"".join(event.data for event in events)


class Feed:
    """Distributes events to readers. Used on one event loop."""

    def __init__(self, *, limit: int = QUEUE, most: int = MOST_READERS) -> None:
        self._limit = limit
        self._places = ConcurrencyLimit(most, "pages follow this gateway already; close one of them")
        self._readers: set[Reader] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._readers)

    def put(self, event: Event) -> None:
        for reader in self._readers:
            reader.put(event)

    @contextmanager
    def read(self, wants: Callable[[str], bool]) -> Iterator[Reader]:
        """Subscribe to events of cameras that ``wants`` accepts. Raises ``CapacityError``: too many readers."""
        with self._places.taken():
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
        self._closed = True
        for reader in self._readers:
            reader.close()


log = logging.getLogger(__name__)

POLL_S = 1.0
QUIET_POLL_S = 5.0
"""Poll interval while no browser follows, in seconds."""
COUNTERS_S = 5.0
"""Minimum interval, in seconds, of events for a camera of which only counters and ages changed."""
RETRY_S = 5.0


class Live:
    """Polls from :meth:`start` to :meth:`stop`. ``cameras``, ``replicas``: result of the last successful poll, made at
    ``seen_s`` (monotonic). ``trouble``: why the last poll failed, empty if it succeeded.
    """

    def __init__(self, directory: Directory, hub: AnswerHub, calls: InProcessCalls, *, poll_s: float = POLL_S) -> None:
        self._directory, self._hub, self._calls, self._poll_s = directory, hub, calls, poll_s
        # Time and content of the last status sent of each camera, or its status before any browser followed.
        self._sent: dict[str, tuple[float, CameraStatus]] = {}
        self._listing: asyncio.Task[Mapping[str, bytes]] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._followed = False
        self.feed = Feed()
        self.history = History()
        self.cameras: Mapping[str, CameraStatus] = {}
        self.replicas: Sequence[ReplicaStatus] = ()
        self.seen_s = float("-inf")
        self.trouble = "the controller has not answered yet"

    def start(self) -> None:
        work: tuple[Callable[[], Awaitable[None]], ...] = (self._answers, self._poll, self._incidents)
        self._tasks = [asyncio.create_task(self._forever(each), name=f"live {each.__name__}") for each in work]

    async def stop(self) -> None:
        self.feed.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    async def list(self) -> Mapping[str, bytes]:
        """JSON of all cameras by name, from the controller; raises ``UnavailableError``. Concurrent callers share one
        request: all pages call this when events were missed."""
        before = self._listing
        if before is not None and not before.done():
            # Begun before this call, so it may lack a change that the caller knows of.
            await asyncio.wait([before])
        if self._listing is before:
            self._listing = asyncio.create_task(self._list(), name="list cameras")
        assert self._listing is not None
        return await asyncio.shield(self._listing)

    async def _list(self) -> Mapping[str, bytes]:
        return {each.name: encoded(each) async for each in yielding(await self._directory.list_cameras())}

    def look(self) -> None:
        """Poll at once, after a change or when a browser starts to follow."""
        self._wake.set()

    def trouble_event(self) -> Event:
        """Event with :attr:`trouble`, which every page shows."""
        return Event.of("trouble", "", {"trouble": self.trouble})

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except SightlineError as error:
                log.debug("%s: %s", work.__name__, error)
            except Exception:
                # Keep going, or browsers would get no more events from this gateway.
                log.exception("live events: %s failed", work.__name__)
            await asyncio.sleep(RETRY_S)

    async def _answers(self) -> None:
        with self._hub.subscribe() as answers:
            async for answer, missed in answers:
                end_unix_s = self.history.answer(answer)
                if not self.feed:
                    continue
                if missed:
                    # To all readers, since the lost answers may be of any camera.
                    self.feed.put(Event.of("missed", "", {"events": missed}))
                body = json.loads(encoded(answer))
                body["camera"] = body.pop("stream")
                self.feed.put(Event.of("answer", answer.stream, {**body, "end_unix_s": end_unix_s}))

    async def _incidents(self) -> None:
        # The stream begins with open incidents; pages fetch those that ended while alerting was away.
        follow = incidents_pb2.FollowRequest(open=True)
        method = "/sightline.v1.Incidents/Follow"
        async for message in self._calls.inner_stream(method, follow, on_begin=self._follow_began):
            if message.missed:
                self.feed.put(Event.of("missed", "", {"events": message.missed}))
            event = from_message(AlertEvent, message)
            body = {"key": event.key, "event": event.kind, "cause": event.cause, "at_s": event.at_s}
            body |= {"silent": event.silent, "incident": event.incident}
            self.feed.put(Event.of("incident", event.incident.camera, body))

    def _follow_began(self) -> None:
        if self._followed:
            # An unknown number.
            self.feed.put(Event.of("missed", "", {"events": 0}))
        self._followed = True

    async def _poll(self) -> None:
        while True:
            self._wake.clear()
            before, began_s, poll_s = self.trouble, time.monotonic(), self._poll_s
            try:
                cameras = await self._directory.list_cameras()
                self.replicas = await self._directory.list_replicas()
                self.trouble, self.seen_s = "", time.monotonic()
            except SightlineError as error:
                self.trouble = str(error)
            else:
                await self._publish_changes(cameras)
                poll_s = poll_pause_s(poll_s, time.monotonic() - began_s)
            if self.trouble != before:
                self.feed.put(self.trouble_event())
            try:
                async with asyncio.timeout(poll_s if self.feed else max(poll_s, QUIET_POLL_S)):
                    await self._wake.wait()
                # Limits the rate of requested polls, each of which costs the controller time.
                await asyncio.sleep(self._poll_s / 4)
            except TimeoutError:
                pass

    async def _publish_changes(self, cameras: Sequence[CameraStatus]) -> None:
        before, now = self.cameras, {status.name: status for status in cameras}
        self.cameras = now
        removed = [name for name, status in before.items() if name not in now or now[name].life != status.life]
        for name in removed:
            self._sent.pop(name, None)
            self.feed.put(Event.of("removed", name, {"name": name}))
        # On every poll, since answers of removed cameras may still have arrived.
        kept = now.keys() - set(removed)
        self.history.keep(kept)
        self._hub.forget(lambda name: name not in kept)
        async for name, status in yielding(now.items()):
            self.history.status(status)
            sent_s, sent = self._sent.get(name, (float("-inf"), None))
            if not len(self.feed):
                self._sent[name] = sent_s, status
            elif status != sent:
                urgent = sent is None or _without_counters(status) != _without_counters(sent)
                if urgent or self.seen_s - sent_s >= COUNTERS_S:
                    self._sent[name] = self.seen_s, status
                    self.feed.put(Event.of("camera", name, status))


_SLOW = {
    "retry_in_s",
    "last_frame_age_s",
    "frames_decoded",
    "frames_sampled",
    "windows_done",
    "windows_gated",
    "tokens_full",
    "tokens_kept",
    "tokens_computed",
    "latency_s",
    "memory_bytes",
    "memory_frames",
    "memory_oldest_s",
    "windows_per_s",
    "expected_lag_s",
}
_without_counters = attrgetter(*(each.name for each in fields(CameraStatus) if each.name not in _SLOW))
