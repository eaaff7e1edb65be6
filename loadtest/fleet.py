"""A fleet of simulated cameras on one event loop: they come, send, lose their connection, and leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from cluster.client import GatewayClient
from cluster.config import SightlineConfig
from cluster.errors import SightlineError, UnavailableError, UnknownCameraError
from cluster.lab.bench.window_accounting import Account, CameraLedger, Slot, account
from cluster.types import Answer, CameraStatus, EncodedPacket, Question
from cluster.wire.push import PushStatus
from loadtest.agent import FedAgent
from loadtest.footage import Footage
from loadtest.profile import CameraScript, Due, Profile, packets, script
from loadtest.rtsp import RtspCameras
from loadtest.target import Target

TICK_S = 0.01
"""Packets that are due within so long leave together: waking for each would cost more than sending it."""


class Pacer:
    """Sends packets when they are due, in monotonic seconds, by timers of the running event loop. A camera's packets
    come from an iterator that never ends; ``send`` must not wait."""

    def __init__(self) -> None:
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._tickets = itertools.count()
        self._lateness = array("d")

    def add(self, began_s: float, packets: Iterator[Due], send: Callable[[Due], None]) -> int:
        """A camera begins at ``began_s``; returns its ticket for :meth:`remove`."""
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
        """Nothing more of this camera is sent."""
        self._timers.pop(ticket).cancel()

    def take_lateness(self) -> array[float]:
        """Seconds by which each packet since the last call was sent late, 0 for none."""
        taken, self._lateness = self._lateness, array("d")
        return taken


T = TypeVar("T")

CALLS = 8
"""Calls to the gateway that are under way at once."""

AWAY_S, AGAIN_S = 15.0, 0.5
"""How long a gateway that does not answer is asked again, and how often: it may be restarting."""

CLOSE_S = 2.0
"""Seconds of video that close a window which ended before them: a frame's samples, and what the decoder holds back."""

LEAVE_S, LEAVE_STRIDES = 3.0, 3.0
"""How long a camera that leaves waits for the answers to what it sent."""

PULL_S = 10.0
"""Seconds after which windows of a camera are due that nobody has connected to."""

CONNECT_S = 0.5
"""Seconds for the last camera's connection before the first packet is due."""


@dataclass(frozen=True, slots=True)
class CameraSetup:
    """What every camera is added with: ``settings`` as in the configuration's ``cameras`` entries."""

    questions: tuple[Question, ...]
    settings: Mapping[str, Any]
    stride_s: float


QUESTION = Question("person", "Is there a person in the scene?")
"""Asked where the configuration has none of its own."""


def camera_setup(config: SightlineConfig) -> CameraSetup:
    """What a configuration's sections mean for a camera that is added while the cluster runs, which may be one with
    other sections of its own."""
    sections = ("sampling", "pruning", "window", "memory")
    settings = {name: getattr(config, name).model_dump(mode="json") for name in sections}
    questions = tuple(question.question() for question in config.questions) or (QUESTION,)
    return CameraSetup(questions, settings, config.window.stride_s)


class Line(Protocol):
    """A camera's way to the cluster: :class:`FedAgent` pushes, :class:`RtspLine` is pulled from."""

    @property
    def status(self) -> PushStatus: ...

    async def run(self) -> object:
        """Until cancelled; raises ``SightlineError`` when the cluster refuses the camera for good."""
        ...

    def deliver(self, packet: EncodedPacket) -> None: ...
    def lose(self) -> None: ...
    def cut(self) -> None: ...


@dataclass(slots=True, eq=False)
class Camera:
    """One simulated camera that is there or was."""

    script: CameraScript
    ledger: CameraLedger
    agent: Line
    task: asyncio.Task[object] | None = None
    ticket: int | None = None
    status: CameraStatus | None = None
    status_s: float = 0.0

    @property
    def name(self) -> str:
        return self.script.name

    def account(self, slots: Sequence[Slot], *, listened: bool, since_s: float = math.inf) -> Account:
        """What became of these windows, against what the cluster last said of the camera (:func:`account`)."""
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

    def told(self, status: CameraStatus) -> None:
        self.status, self.status_s = status, time.monotonic()


class Sent(NamedTuple):
    """What cameras have done so far. ``dropped``: packets that agents dropped because their buffers were full,
    ``refused``: packets the cluster dropped, ``lost``: packets that a profile or a fault kept from arriving."""

    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    refused: int = 0
    reconnects: int = 0
    lost: int = 0

    @classmethod
    def of(cls, status: PushStatus) -> Self:
        """One camera's."""
        return cls(status.packets, status.bytes, status.dropped, status.cluster_dropped, status.reconnects)

    def plus(self, *others: Sent) -> Sent:
        return Sent(*map(sum, zip(self, *others, strict=True)))

    def minus(self, before: Sent) -> Sent:
        return Sent(*(now - then for now, then in zip(self, before, strict=True)))


class Fleet:
    """Call everything from the loop that ``pacer`` runs on.

    ``footage``: what cameras send, by the names of the profile's mix; ``prefix``: of cameras' names; ``rtsp``: serves
    the cameras of a profile whose transport that is.
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
        self.setup = camera_setup(target.config)
        self.cameras: dict[str, Camera] = {}
        self._ever: dict[str, Camera] = {}
        # Names that the cluster may know.
        self._added: set[str] = set()
        self.failures: list[str] = []
        self.loss = 0.0
        self._footage = dict(footage)
        self._header = next(iter(footage.values())).header
        self._prefix = prefix
        self.pacer = Pacer()
        self._client = GatewayClient(target.gateway, deadline_s=30.0, credentials=target.credentials)
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="gateway")
        self._numbers = itertools.count()
        self._random = random.Random(profile.seed)
        self._grid_s: float | None = None
        # Packets on the way to the cluster.
        self._lost = 0

    # -- who is there ---------------------------------------------------------------------------
    async def grow(self, count: int) -> float:
        """Add cameras until there are ``count``; returns when the last of them begins, monotonic seconds.

        They connect one after the other over the profile's ``ramp_s``, then begin at their phases of a stride that is
        the same for all cameras ever added. Raises ``SightlineError``: the cluster does not take one.
        """
        return await self._add(count - len(self.cameras), self.profile.ramp_s)

    async def _add(self, count: int, ramp_s: float) -> float:
        scripts = [script(self.profile, next(self._numbers), self._prefix) for _ in range(count)]
        if not scripts:
            return time.monotonic()
        # All of them, before the first refusal is told: none is added behind the back of who takes them away.
        for told in await asyncio.gather(*map(self._register, scripts), return_exceptions=True):
            if told is not None:
                raise told
        begin_s = self._next_stride(time.monotonic() + ramp_s + CONNECT_S)
        for number, each in enumerate(scripts):
            self._start(each, begin_s + each.phase * self.setup.stride_s)
            if ramp_s:
                await asyncio.sleep(ramp_s / len(scripts) if number + 1 < len(scripts) else 0)
        return begin_s + max(each.phase for each in scripts) * self.setup.stride_s

    async def shrink(self, count: int) -> None:
        """The newest cameras leave until there are ``count``."""
        names = list(self.cameras)[count:]
        await asyncio.gather(*(self.remove(name) for name in names))

    def remove(self, name: str) -> Coroutine[Any, Any, None]:
        """A camera leaves now, and nobody else can send it away; await the cluster's last word on it, which is kept in
        its ``status``."""
        camera = self.cameras.pop(name)
        camera.ledger.until_s = time.monotonic()
        return self._leave(camera)

    async def _leave(self, camera: Camera) -> None:
        # Windows due by now close with what comes after them.
        await asyncio.sleep(min(CLOSE_S, self.setup.stride_s))
        await self._stop(camera)
        await self._last_word(camera)
        await self._take_away(camera.name)

    async def _take_away(self, name: str) -> None:
        with contextlib.suppress(UnknownCameraError):
            await self._call(self._client.camera_remove, name)
        self._added.discard(name)

    async def _last_word(self, camera: Camera) -> None:
        """Wait until the cluster has answered or counted what the camera sent, for so long as it may take."""
        deadline_s = time.monotonic() + max(LEAVE_S, LEAVE_STRIDES * self.setup.stride_s)
        while True:
            camera.told(await self._call(self._client.camera_get, camera.name))
            slots = camera.ledger.slots(camera.ledger.until_s)
            if not camera.account(slots, listened=False).silent or time.monotonic() >= deadline_s:
                return
            await asyncio.sleep(self.setup.stride_s / 4)

    async def replace_one(self) -> None:
        """One camera, drawn at random, leaves, and another comes."""
        if self.cameras:
            leaving = self.remove(self._random.choice(sorted(self.cameras)))
            await asyncio.gather(leaving, self._add(1, 0.0))

    def storm(self, share: float) -> list[str]:
        """Connections break at once; returns whose."""
        names = sorted(self.cameras)
        struck = sorted(self._random.sample(names, max(1, math.ceil(share * len(names))))) if names else []
        for name in struck:
            self.cameras[name].agent.cut()
        return struck

    async def close(self, *, remove: bool) -> None:
        """All cameras stop sending; ``remove``: and the cluster is told to forget them."""
        # Those that were on their way out, too.
        await asyncio.gather(*(self._stop(camera) for camera in self._ever.values()))
        if remove:
            await asyncio.gather(*map(self._take_away, self._added))
        self._client.close()
        self._threads.shutdown(wait=False)

    # -- what is seen of them -------------------------------------------------------------------
    def saw(self, answer: Answer, seen_s: float) -> Camera | None:
        """An answer of any camera came; returns the camera if it is, or was, of this fleet."""
        camera = self._ever.get(answer.stream)
        if camera is not None:
            camera.ledger.saw(answer, seen_s)
        return camera

    def everyone(self) -> list[Camera]:
        """All cameras there ever were."""
        return list(self._ever.values())

    async def statuses(self) -> Sequence[CameraStatus]:
        """What the cluster says of its cameras now, and of this fleet's it is remembered. Raises ``UnavailableError``:
        no answer."""
        statuses = await self._call(self._client.cameras_list)
        for status in statuses:
            if status.name in self.cameras:
                self.cameras[status.name].told(status)
        return [status for status in statuses if status.name in self.cameras]

    def sent(self) -> Sent:
        """Totals over all cameras there ever were."""
        return Sent(lost=self._lost).plus(*(Sent.of(camera.agent.status) for camera in self._ever.values()))

    # -- inside ---------------------------------------------------------------------------------
    async def _call(self, method: Callable[..., T], *arguments: object) -> T:
        """A blocking call beside the loop."""
        loop, until_s = asyncio.get_running_loop(), time.monotonic() + AWAY_S
        while True:
            try:
                return await loop.run_in_executor(self._threads, method, *arguments)
            except UnavailableError:
                if time.monotonic() >= until_s:
                    raise
            await asyncio.sleep(AGAIN_S)

    def _next_stride(self, after_s: float) -> float:
        if self._grid_s is None:
            self._grid_s = after_s
        return self._grid_s + math.ceil((after_s - self._grid_s) / self.setup.stride_s) * self.setup.stride_s

    async def _register(self, camera: CameraScript) -> None:
        source = "" if self._rtsp is None else self._rtsp.url(camera.name)
        self._added.add(camera.name)
        # By force: to find out what a cluster keeps up with, it has to be given more than it thinks it can take.
        add = partial(self._client.camera_add, settings=dict(self.setup.settings), force=True)
        await self._call(add, camera.name, source, self.setup.questions)

    def _start(self, camera: CameraScript, begin_s: float) -> None:
        ledger = CameraLedger(camera.name, begin_s, self.setup.stride_s)
        added = Camera(camera, ledger, self._line(ledger))
        self.cameras[camera.name] = self._ever[camera.name] = added
        added.task = asyncio.create_task(self._keep(added), name=camera.name)
        assert self._grid_s is not None
        sent = packets(self.profile, camera, self._footage, began_s=begin_s - self._grid_s)
        added.ticket = self.pacer.add(begin_s, sent, lambda due: self._send(added.agent, due))

    def _line(self, ledger: CameraLedger) -> Line:
        if self._rtsp is None:
            gather_s, credentials = self.profile.gather_s, self._target.credentials
            return FedAgent(self._header, self._target.gateway, ledger.name, gather_s=gather_s, credentials=credentials)
        # Who pulls connects in its own time, but not for ever.
        ledger.from_s = ledger.began_s + PULL_S

        def first(moment_s: float) -> None:
            ledger.from_s = moment_s

        return self._rtsp.add(ledger.name, self._header, first)

    def _send(self, agent: Line, due: Due) -> None:
        if due.lost or (self.loss and self._random.random() < self.loss):
            self._lost += 1
            agent.lose()
        else:
            agent.deliver(due.packet)

    async def _keep(self, camera: Camera) -> None:
        try:
            await camera.agent.run()
        except SightlineError as error:
            self.failures.append(f"{camera.name}: {error}")

    async def _stop(self, camera: Camera) -> None:
        if camera.ticket is not None:
            self.pacer.remove(camera.ticket)
            camera.ticket = None
        if camera.task is not None:
            camera.task.cancel()
            await asyncio.wait({camera.task})
