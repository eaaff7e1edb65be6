"""``Live``: the gateway's eyes on cameras, answers and incidents; history in rings, events for browsers."""

from __future__ import annotations

import asyncio
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
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.replies import encoded, jsonable
from cluster.security.limits import SharedPlaces
from cluster.types import MICROSECONDS, Answer, CameraStatus
from cluster.types.reports import ReplicaStatus
from cluster.wire.answers import AnswerHub, giving_way, rest_s
from cluster.wire.mapping import from_message

T = TypeVar("T")

KEPT = 120
"""Scores per question, and changes of rung per camera."""
MOST_QUESTIONS = 64
MOST_CAMERAS = 20_000

_WIDTH = 4


class Ring:
    """The last ``kept`` scores: (Unix time of the window's end, score, flags, seconds of video), 32 bytes each."""

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
    """Of every camera that there is; those that are removed are forgotten with :meth:`keep`."""

    def __init__(self) -> None:
        self._cameras: dict[str, _Camera] = {}

    def answer(self, answer: Answer, now_s: float | None = None) -> float:
        """Note its score; returns the Unix time of the window's end.

        That is when its last frame came: the camera's own clock may have begun anywhere.
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
        """Note the camera's rung, where it is another one than before."""
        camera = self._camera(status.name)
        if camera is not None and (not camera.rungs or camera.rungs[-1][1] != status.rung):
            at_s = time.time() if now_s is None else now_s
            camera.rungs.append((round(at_s, 3), status.rung, status.rung_reason))

    def keep(self, names: Collection[str]) -> None:
        """Forget all cameras but these."""
        for gone in self._cameras.keys() - set(names):
            del self._cameras[gone]

    def forget(self, name: str, before_s: float) -> None:
        """Scores of windows that ended before this Unix time."""
        camera = self._cameras.get(name, _Camera())
        camera.scores = {question: ring.since(before_s) for question, ring in camera.scores.items()}

    def body(self, name: str) -> dict[str, Any]:
        """``{"scores": {question: rows}, "rungs": [[unix_s, rung, reason], …]}``; empty for a camera not known yet."""
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
"""Answers and incidents that wait for one browser."""
MOST_READERS = 256


@dataclass(frozen=True, slots=True)
class Event:
    """One event as it is sent; ``camera`` is whom it is about."""

    kind: str
    camera: str
    data: bytes

    @classmethod
    def of(cls, kind: str, camera: str, body: Any) -> Self:
        # JSON has no line ends outside of text, where they are escaped: one data line is enough.
        return cls(kind, camera, b"event: %s\ndata: %s\n\n" % (kind.encode(), encoded(body)))


class Reader:
    """One browser's events: of cameras only the newest status each, the newest trouble, of the rest the newest
    ``limit``."""

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
        self._limit = limit
        self._places = SharedPlaces(most, "pages follow this gateway already; close one of them")
        self._readers: set[Reader] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._readers)

    def put(self, event: Event) -> None:
        for reader in self._readers:
            reader.put(event)

    @contextmanager
    def read(self, wants: Callable[[str], bool]) -> Iterator[Reader]:
        """Events from now on, of cameras that are wanted. Raises ``CapacityError``: too many read already."""
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
"""Between looks at the cameras while no browser follows."""
COUNTERS_S = 5.0
"""A camera of which only counters and ages changed is told so seldom."""
RETRY_S = 5.0


class Live:
    """Looks from :meth:`start` to :meth:`stop`; ``cameras``, ``replicas``: as last seen, ``seen_s`` when (monotonic).

    ``trouble``: why the last look failed, empty while looks succeed.
    """

    def __init__(self, directory: Directory, hub: AnswerHub, calls: Calls, *, poll_s: float = POLL_S) -> None:
        self._directory, self._hub, self._calls, self._poll_s = directory, hub, calls, poll_s
        # What the browsers were last told of each camera, or what was there before any followed; and when it was told.
        self._told: dict[str, tuple[float, CameraStatus]] = {}
        self._listing: asyncio.Task[Mapping[str, bytes]] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._followed = False
        self.feed = Feed()
        self.history = History()
        self.cameras: Mapping[str, CameraStatus] = {}
        self.replicas: Sequence[ReplicaStatus] = ()
        self.seen_s = float("-inf")
        self.trouble = "nothing was seen yet"

    def start(self) -> None:
        work: tuple[Callable[[], Awaitable[None]], ...] = (self._answers, self._look, self._incidents)
        self._tasks = [asyncio.create_task(self._forever(each), name=f"live {each.__name__}") for each in work]

    async def stop(self) -> None:
        self.feed.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    async def list(self) -> Mapping[str, bytes]:
        """JSON of all cameras as the controller has them now; raises ``UnavailableError``. Whoever asks at once gets
        the same: all pages do, where events were missed."""
        before = self._listing
        if before is not None and not before.done():
            # It began before this was asked, and may lack what the caller was told of.
            await asyncio.wait([before])
        if self._listing is before:
            self._listing = asyncio.create_task(self._list(), name="list cameras")
        assert self._listing is not None
        return await asyncio.shield(self._listing)

    async def _list(self) -> Mapping[str, bytes]:
        return {each.name: encoded(each) async for each in giving_way(await self._directory.list_cameras())}

    def look(self) -> None:
        """Look at the cameras at once: something was changed, or somebody begins to follow."""
        self._wake.set()

    def trouble_event(self) -> Event:
        """Tells :attr:`trouble`, which every page shows."""
        return Event.of("trouble", "", {"trouble": self.trouble})

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except SightlineError as error:
                log.debug("%s: %s", work.__name__, error)
            except Exception:
                # Without it, browsers would see a standstill for as long as the gateway lives.
                log.exception("live events: %s failed", work.__name__)
            await asyncio.sleep(RETRY_S)

    async def _answers(self) -> None:
        with self._hub.subscribe() as answers:
            async for answer, missed in answers:
                end_unix_s = self.history.answer(answer)
                if not self.feed:
                    continue
                if missed:
                    # Whoever looks at other cameras, too: what was lost may have been of these.
                    self.feed.put(Event.of("missed", "", {"events": missed}))
                body = jsonable(answer)
                body["camera"] = body.pop("stream")
                self.feed.put(Event.of("answer", answer.stream, {**body, "end_unix_s": end_unix_s}))

    async def _incidents(self) -> None:
        # What opened while alerting was away comes first; what ended has to be fetched.
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
            # Nobody knows how many.
            self.feed.put(Event.of("missed", "", {"events": 0}))
        self._followed = True

    async def _look(self) -> None:
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
                await self._tell(cameras)
                poll_s = rest_s(poll_s, time.monotonic() - began_s)
            if self.trouble != before:
                self.feed.put(self.trouble_event())
            try:
                async with asyncio.timeout(poll_s if self.feed else max(poll_s, QUIET_POLL_S)):
                    await self._wake.wait()
                # However often it is asked for: a look costs the controller something.
                await asyncio.sleep(self._poll_s / 4)
            except TimeoutError:
                pass

    async def _tell(self, cameras: Sequence[CameraStatus]) -> None:
        before, now = self.cameras, {status.name: status for status in cameras}
        self.cameras = now
        gone = [name for name, status in before.items() if name not in now or now[name].life != status.life]
        for name in gone:
            self._told.pop(name, None)
            self.feed.put(Event.of("removed", name, {"name": name}))
        # Also of answers that were on their way when their camera was removed.
        kept = now.keys() - set(gone)
        self.history.keep(kept)
        self._hub.forget(lambda name: name not in kept)
        async for name, status in giving_way(now.items()):
            self.history.status(status)
            told_s, told = self._told.get(name, (float("-inf"), None))
            if not len(self.feed):
                self._told[name] = told_s, status
            elif status != told:
                quick = told is None or _without_counters(status) != _without_counters(told)
                if quick or self.seen_s - told_s >= COUNTERS_S:
                    self._told[name] = self.seen_s, status
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
