"""A fleet of simulated cameras on one event loop: cameras join, send, lose their connections, and leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cluster.client import GatewayClient
from cluster.errors import SightlineError, UnavailableError, UnknownCameraError
from cluster.lab.bench.window_accounting import Account, CameraWindows, Slot, account
from cluster.types import Answer, CameraStatus, Question
from loadtest.agent import FedAgent
from loadtest.footage import Footage
from loadtest.profile import CameraScript, Due, Profile, packets, script
from loadtest.rtsp import RtspCameras, RtspLine
from loadtest.target import Target

TICK_S = 0.01
"""Timer granularity: packets due in the same tick are sent together, as a wake-up costs more than sending one."""


class Pacer:
    """Sends packets when they are due (monotonic seconds), on timers of the running event loop. A camera's packets come
    from an infinite iterator; ``send`` must not block."""

    def __init__(self) -> None:
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._tickets = itertools.count()
        self._lateness = array("d")

    def add(self, began_s: float, packets: Iterator[Due], send: Callable[[Due], None]) -> int:
        """Start a camera at ``began_s``; returns its ticket for :meth:`remove`."""
        ticket = next(self._tickets)

        def wait() -> None:
            due = next(packets)
            due_s = began_s + due.at_s
            at_s = TICK_S * math.ceil(due_s / TICK_S)
            self._timers[ticket] = asyncio.get_running_loop().call_at(at_s, leave, due, due_s)

        def leave(due: Due, due_s: float) -> None:
            self._lateness.append(max(0.0, time.monotonic() - due_s))
            send(due)
            wait()

        wait()
        return ticket

    def remove(self, ticket: int) -> None:
        """Stop sending the packets of this camera."""
        self._timers.pop(ticket).cancel()

    def take_lateness(self) -> array[float]:
        """Delay in seconds of each packet sent since the last call, 0 if on time."""
        taken, self._lateness = self._lateness, array("d")
        return taken


T = TypeVar("T")

MAX_CALLS = 8
"""Maximum concurrent calls to the gateway."""

RETRY_FOR_S, RETRY_INTERVAL_S = 15.0, 0.5
"""Retry period and interval for calls to an unavailable gateway, which may be restarting."""

CLOSE_S = 2.0
"""Seconds of further video needed to close a window that is due: a frame's samples, and the decoder's delay."""

LEAVE_S, LEAVE_STRIDES = 3.0, 3.0
"""Maximum wait, in seconds and in strides (the longer counts), for the answers to a leaving camera's video."""

PULL_S = 10.0
"""Seconds after which windows of an RTSP camera count as due even if the cluster has not connected to it."""

CONNECT_S = 0.5
"""Seconds between the last camera's start and the first packet, for it to connect."""


QUESTION = Question("person", "Is there a person in the scene?")
"""Default question, if the configuration has none."""

SECTIONS = ("sampling", "pruning", "window", "memory")
"""Sections of the configuration that every camera gets as its own, so that a running cluster's do not matter."""

SENT = ("packets", "bytes", "dropped", "cluster_dropped", "reconnects")

Line = FedAgent | RtspLine
"""A camera's connection to the cluster: :class:`FedAgent` pushes, :class:`RtspLine` is pulled from."""


@dataclass(slots=True, eq=False)
class Camera:
    """One simulated camera, present or past."""

    script: CameraScript
    ledger: CameraWindows
    agent: Line
    task: asyncio.Task[object] | None = None
    ticket: int | None = None
    status: CameraStatus | None = None
    status_s: float = 0.0

    @property
    def name(self) -> str:
        return self.script.name

    def account(self, slots: Sequence[Slot], *, listened: bool, since_s: float = math.inf) -> Account:
        """Reconcile these windows with the cluster's last status of the camera (:func:`account`)."""
        said = self.status
        return account(
            slots,
            self.ledger.seen,
            answered=said.windows_done + said.windows_gated if said else 0,
            given_up=said.windows_dropped + said.windows_lost if said else 0,
            listened=listened,
            since_s=since_s,
            most=self.ledger.most(self.status_s),
        )

    def record_status(self, status: CameraStatus) -> None:
        self.status, self.status_s = status, time.monotonic()


class Fleet:
    """Simulated cameras of one load test. All methods must be called on the event loop that ``pacer`` runs on.

    ``footage``: by the names in the profile's mix; ``prefix``: of camera names; ``rtsp``: the server for profiles with
    that transport.
    """

    def __init__(
        self,
        target: Target,
        profile: Profile,
        footage: Mapping[str, Footage],
        *,
        prefix: str = "load",
        rtsp: RtspCameras | None = None,
    ) -> None:
        self._rtsp = rtsp
        self._target = target
        self.profile = profile
        self.stride_s = target.config.window.stride_s
        self.questions = tuple(question.question() for question in target.config.questions) or (QUESTION,)
        self._settings = {name: getattr(target.config, name).model_dump(mode="json") for name in SECTIONS}
        self.cameras: dict[str, Camera] = {}
        self._all: dict[str, Camera] = {}
        # Names that the cluster may know.
        self._registered: set[str] = set()
        self.failures: list[str] = []
        self.loss = 0.0
        self._footage = dict(footage)
        self._header = next(iter(footage.values())).header
        self._prefix = prefix
        self.pacer = Pacer()
        self._client = GatewayClient(target.gateway, deadline_s=30.0, credentials=target.credentials)
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="gateway")
        self._numbers = itertools.count()
        self._random = random.Random(profile.seed)
        self._origin_s: float | None = None
        self._lost = 0

    # -- joining and leaving --------------------------------------------------------------------
    async def grow(self, count: int) -> float:
        """Add cameras until there are ``count``; returns when the last of them starts, in monotonic seconds.

        They connect one by one over the profile's ``ramp_s``, then start at their phases on a stride grid shared by all
        cameras ever added. Raises ``SightlineError``: the cluster rejects one.
        """
        return await self._add(count - len(self.cameras), self.profile.ramp_s)

    async def _add(self, count: int, ramp_s: float) -> float:
        scripts = [script(self.profile, next(self._numbers), self._prefix) for _ in range(count)]
        if not scripts:
            return time.monotonic()
        # Await all before raising the first error: no registration may be in flight when the caller cleans up.
        for error in await asyncio.gather(*map(self._register, scripts), return_exceptions=True):
            if error is not None:
                raise error
        begin_s = self._next_stride(time.monotonic() + ramp_s + CONNECT_S)
        for number, each in enumerate(scripts):
            self._start(each, begin_s + each.phase * self.stride_s)
            if ramp_s:
                await asyncio.sleep(ramp_s / len(scripts) if number + 1 < len(scripts) else 0)
        return begin_s + max(each.phase for each in scripts) * self.stride_s

    async def shrink(self, count: int) -> None:
        """Remove the newest cameras until there are ``count``."""
        names = list(self.cameras)[count:]
        await asyncio.gather(*(self.remove(name) for name in names))

    def remove(self, name: str) -> Coroutine[Any, Any, None]:
        """Take a camera out immediately, so that it cannot be removed twice; await the result to drain and deregister
        it. Its ``status`` keeps the cluster's final counts."""
        camera = self.cameras.pop(name)
        camera.ledger.until_s = time.monotonic()
        return self._leave(camera)

    async def _leave(self, camera: Camera) -> None:
        # Windows that are due only close with the video after them.
        await asyncio.sleep(min(CLOSE_S, self.stride_s))
        await self._stop(camera)
        await self._drain(camera)
        await self._deregister(camera.name)

    async def _deregister(self, name: str) -> None:
        with contextlib.suppress(UnknownCameraError):
            await self._call(self._client.camera_remove, name)
        self._registered.discard(name)

    async def _drain(self, camera: Camera) -> None:
        """Wait, within a limit, until the cluster has answered or counted all windows of the camera."""
        deadline_s = time.monotonic() + max(LEAVE_S, LEAVE_STRIDES * self.stride_s)
        while True:
            camera.record_status(await self._call(self._client.camera_get, camera.name))
            slots = camera.ledger.slots(camera.ledger.until_s)
            if not camera.account(slots, listened=False).silent or time.monotonic() >= deadline_s:
                return
            await asyncio.sleep(self.stride_s / 4)

    async def replace_one(self) -> None:
        """Replace a random camera by a new one."""
        if self.cameras:
            leaving = self.remove(self._random.choice(sorted(self.cameras)))
            await asyncio.gather(leaving, self._add(1, 0.0))

    def storm(self, share: float) -> list[str]:
        """Break the connections of a random share of the cameras at once; returns their names."""
        names = sorted(self.cameras)
        struck = sorted(self._random.sample(names, max(1, math.ceil(share * len(names))))) if names else []
        for name in struck:
            self.cameras[name].agent.cut()
        return struck

    async def close(self, *, remove: bool) -> None:
        """Stop all cameras; ``remove``: also delete them from the cluster."""
        # Including those that are leaving.
        await asyncio.gather(*(self._stop(camera) for camera in self._all.values()))
        if remove:
            await asyncio.gather(*map(self._deregister, self._registered))
        self._client.close()
        self._threads.shutdown(wait=False)

    # -- observations ---------------------------------------------------------------------------
    def saw(self, answer: Answer, seen_s: float) -> Camera | None:
        """Record an answer; returns its camera if it is, or was, of this fleet."""
        camera = self._all.get(answer.stream)
        if camera is not None:
            camera.ledger.saw(answer, seen_s)
        return camera

    def everyone(self) -> list[Camera]:
        """All cameras, present and past."""
        return list(self._all.values())

    async def statuses(self) -> Sequence[CameraStatus]:
        """Fetch and record the cluster's status of the present cameras. Raises ``UnavailableError``: no gateway
        answers."""
        statuses = await self._call(self._client.cameras_list)
        for status in statuses:
            if status.name in self.cameras:
                self.cameras[status.name].record_status(status)
        return [status for status in statuses if status.name in self.cameras]

    def sent(self) -> Counter[str]:
        """Totals over all cameras, present and past: ``SENT`` of ``PushStatus``, and the packets ``lost``, withheld by
        the profile or a fault."""
        total = Counter(lost=self._lost)
        for camera in self._all.values():
            total.update({name: getattr(camera.agent.status, name) for name in SENT})
        return total

    # -- internals ------------------------------------------------------------------------------
    async def _call(self, method: Callable[..., T], *arguments: object) -> T:
        """Run a blocking gateway call in a thread, retrying while the gateway is unavailable."""
        loop, until_s = asyncio.get_running_loop(), time.monotonic() + RETRY_FOR_S
        while True:
            try:
                return await loop.run_in_executor(self._threads, method, *arguments)
            except UnavailableError:
                if time.monotonic() >= until_s:
                    raise
            await asyncio.sleep(RETRY_INTERVAL_S)

    def _next_stride(self, after_s: float) -> float:
        if self._origin_s is None:
            self._origin_s = after_s
        return self._origin_s + math.ceil((after_s - self._origin_s) / self.stride_s) * self.stride_s

    async def _register(self, camera: CameraScript) -> None:
        source = "" if self._rtsp is None else self._rtsp.url(camera.name)
        self._registered.add(camera.name)
        # Forced past admission control: finding the limit takes more cameras than the cluster would admit.
        add = partial(self._client.camera_add, settings=self._settings, force=True)
        await self._call(add, camera.name, source, self.questions)

    def _start(self, camera: CameraScript, begin_s: float) -> None:
        ledger = CameraWindows(camera.name, begin_s, self.stride_s)
        added = Camera(camera, ledger, self._connect(ledger))
        self.cameras[camera.name] = self._all[camera.name] = added
        added.task = asyncio.create_task(self._run_camera(added), name=camera.name)
        assert self._origin_s is not None
        sent = packets(self.profile, camera, self._footage, began_s=begin_s - self._origin_s)
        added.ticket = self.pacer.add(begin_s, sent, lambda due: self._send_packet(added.agent, due))

    def _connect(self, ledger: CameraWindows) -> Line:
        if self._rtsp is None:
            gather_s, credentials = self.profile.gather_s, self._target.credentials
            return FedAgent(self._header, self._target.gateway, ledger.name, gather_s=gather_s, credentials=credentials)
        # The cluster connects in its own time, but its windows are due after PULL_S at the latest.
        ledger.from_s = ledger.began_s + PULL_S

        def first(moment_s: float) -> None:
            ledger.from_s = moment_s

        return self._rtsp.add(ledger.name, self._header, first)

    def _send_packet(self, agent: Line, due: Due) -> None:
        if due.lost or (self.loss and self._random.random() < self.loss):
            self._lost += 1
            agent.lose()
        else:
            agent.deliver(due.packet)

    async def _run_camera(self, camera: Camera) -> None:
        try:
            await camera.agent.run()
        except Exception as error:
            # A fault of the agent itself, too: its windows would seem to be lost by the cluster.
            said = error if isinstance(error, SightlineError) else repr(error)
            self.failures.append(f"{camera.name}: {said}")

    async def _stop(self, camera: Camera) -> None:
        if camera.ticket is not None:
            self.pacer.remove(camera.ticket)
            camera.ticket = None
        if camera.task is not None:
            camera.task.cancel()
            await asyncio.wait({camera.task})
