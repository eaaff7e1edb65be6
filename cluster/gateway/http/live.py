"""``Live``: the gateway's own eyes on cameras, answers and incidents, once for all browsers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Protocol

from sightline.v1 import incidents_pb2

from cluster.alerts.wire import event_from_proto
from cluster.errors import SightlineError
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.feed import Event, Feed
from cluster.gateway.http.history import History
from cluster.gateway.http.plain import plain
from cluster.types import CameraStatus
from cluster.types.reports import ReplicaStatus
from cluster.wire.answers import AnswerHub

log = logging.getLogger(__name__)

POLL_S = 1.0
QUIET_POLL_S = 5.0
"""Between looks at the cameras while no browser follows."""
COUNTERS_S = 5.0
"""A camera of which only counters and ages changed is told so seldom."""
RETRY_S = 5.0


class Directory(Protocol):
    """The controller, as far as it is looked at here; raises ``UnavailableError``."""

    async def list(self) -> Sequence[CameraStatus]: ...

    async def list_replicas(self) -> Sequence[ReplicaStatus]: ...


class Live:
    """Looks from :meth:`start` to :meth:`stop`; ``cameras``, ``replicas``: as last seen, ``seen_s`` when (monotonic).

    ``trouble``: why the last look failed, empty while looks succeed.
    """

    def __init__(self, directory: Directory, hub: AnswerHub, calls: Calls, *, poll_s: float = POLL_S) -> None:
        self._directory = directory
        self._hub = hub
        self._calls = calls
        self._poll_s = poll_s
        self._told: dict[str, float] = {}
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
        """Begin, on the running loop."""
        work: tuple[Callable[[], Awaitable[None]], ...] = (self._answers, self._look, self._incidents)
        self._tasks = [asyncio.create_task(self._forever(each), name=f"live {each.__name__}") for each in work]

    async def stop(self) -> None:
        """End every browser's events."""
        self.feed.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    async def list(self) -> Sequence[CameraStatus]:
        """All cameras as the controller has them now; raises ``UnavailableError``."""
        return await self._directory.list()

    def look(self) -> None:
        """Look at the cameras at once: something was changed, or somebody begins to follow."""
        self._wake.set()

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
                body = plain(answer)
                body["camera"] = body.pop("stream")
                self.feed.put(Event.of("answer", answer.stream, {**body, "end_unix_s": end_unix_s, "missed": missed}))

    async def _incidents(self) -> None:
        # What opened while alerting was away comes first; what ended has to be fetched.
        follow = incidents_pb2.FollowRequest(open=True)
        method = "/sightline.v1.Incidents/Follow"
        async for message in self._calls.inner_stream(method, follow, on_begin=self._follow_began):
            if message.missed:
                self.feed.put(Event.of("missed", "", {"events": message.missed}))
            event = event_from_proto(message)
            body = {"key": event.key, "event": event.kind, "cause": event.cause, "at_s": event.at_s}
            body |= {"quiet": event.quiet, "incident": event.incident}
            self.feed.put(Event.of("incident", event.incident.camera, body))

    def _follow_began(self) -> None:
        if self._followed:
            # Nobody knows how many.
            self.feed.put(Event.of("missed", "", {"events": 0}))
        self._followed = True

    async def _look(self) -> None:
        while True:
            try:
                cameras = await self._directory.list()
                self.replicas = await self._directory.list_replicas()
                self.trouble, self.seen_s = "", time.monotonic()
            except SightlineError as error:
                self.trouble = str(error)
            else:
                self._tell(cameras)
            self._wake.clear()
            try:
                async with asyncio.timeout(self._poll_s if len(self.feed) else max(self._poll_s, QUIET_POLL_S)):
                    await self._wake.wait()
                # However often it is asked for: a look costs the controller something.
                await asyncio.sleep(self._poll_s / 4)
            except TimeoutError:
                pass

    def _tell(self, cameras: Sequence[CameraStatus]) -> None:
        before, now = self.cameras, {status.name: status for status in cameras}
        self.cameras = now
        gone = [name for name, status in before.items() if name not in now or now[name].life != status.life]
        for name in gone:
            self._told.pop(name, None)
            self.feed.put(Event.of("removed", name, {"name": name}))
        if gone or before.keys() != now.keys():
            self.history.keep(now.keys() - set(gone))
        for name, status in now.items():
            self.history.status(status)
            known = before.get(name) if name not in gone else None
            if len(self.feed) and status != known:
                quick = known is None or _without_counters(status) != _without_counters(known)
                if quick or self.seen_s - self._told.get(name, float("-inf")) >= COUNTERS_S:
                    self._told[name] = self.seen_s
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
