"""What a load test does to a cluster under load, by name: processes that die or stop, packets that get lost."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar

from cluster.errors import ConfigError, SightlineError
from cluster.registry import Registry
from loadtest.fleet import Camera
from loadtest.result import FaultResult
from loadtest.stage import Stage

PATIENCE_STRIDES = 8.0
PATIENCE_S = 45.0
LOOK_S = 0.1

NOT_BUILT = {
    "slow-disk": "a running cluster writes nothing to a disk but its logs, and waits for no file, so that there is "
    "nothing that a slow disk could slow down"
}
"""Faults that somebody may look for, and why there is none of that name."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault as it was done. ``victim``: to whom; ``cameras``: those that live there, all others are left alone;
    ``heal``: what ends it after ``hold_s`` seconds."""

    victim: str
    cameras: frozenset[str]
    heal: Callable[[], Awaitable[None]] | None = None


class Fault(ABC):
    """``about``: one sentence for people; ``hold_s``: seconds until it is healed, for those that are."""

    about: ClassVar[str]
    hold_s: ClassVar[float] = 0.0
    only_own: ClassVar[bool] = True

    @abstractmethod
    async def strike(self, stage: Stage) -> Strike:
        """Do it.

        Raises:
            SightlineError: there is nobody to do it to.
        """


faults: Registry[type[Fault]] = Registry("fault")


async def inflict(stage: Stage, name: str) -> FaultResult:
    """Do one fault and wait until all of its cameras are on time again, or for so long that they will not be.

    Raises:
        ConfigError: there is no such fault, or it needs a cluster of the load test's own.
        SightlineError: there was nobody to do it to.
    """
    fault = named(name)()
    if fault.only_own:
        stage.target.only_own(f"the fault {name}")
    await stage.look_at_processes()
    await stage.fleet.statuses()
    at_s = time.monotonic()
    strike = await fault.strike(stage)
    try:
        recovered_s = await _recovery(stage, strike, at_s, fault.hold_s)
    finally:
        if strike.heal is not None:
            await strike.heal()
    return FaultResult(
        name=name,
        victim=strike.victim,
        at_s=at_s - stage.began_s,
        struck=len(strike.cameras),
        recovery_s=recovered_s - at_s,
        stride_s=stage.setup.stride_s,
    )


def named(name: str) -> type[Fault]:
    """The fault of that name.

    Raises:
        ConfigError: there is none; the sentence names those there are.
    """
    if name in NOT_BUILT:
        raise ConfigError(f"there is no fault {name!r}: {NOT_BUILT[name]}")
    return faults.get(name)


async def _recovery(stage: Stage, strike: Strike, at_s: float, hold_s: float) -> float:
    """The moment from which on all cameras of the strike were on time; infinite when that did not come."""
    stride_s = stage.setup.stride_s
    cameras = [stage.fleet.cameras[name] for name in strike.cameras if name in stage.fleet.cameras]
    if strike.heal is not None:
        await asyncio.sleep(hold_s)
        await strike.heal()
    deadline_s = time.monotonic() + max(PATIENCE_S, PATIENCE_STRIDES * stride_s)
    while time.monotonic() < deadline_s:
        moments = recovered(cameras, at_s, time.monotonic())
        # All of a stride must have passed, or a window under way when it happened could be taken for recovery.
        if moments is not None and time.monotonic() - moments >= stride_s:
            return moments
        await asyncio.sleep(LOOK_S)
    return math.inf


def recovered(cameras: list[Camera], at_s: float, now_s: float) -> float | None:
    """When the last of ``cameras`` was on time again after ``at_s``; None while one is not."""
    moments = [camera.books.on_time_since(at_s, now_s) for camera in cameras]
    known = [moment for moment in moments if moment is not None]
    return max(known, default=at_s) if len(known) == len(moments) else None


# -- processes ----------------------------------------------------------------------------------
def _busiest(stage: Stage, role: str) -> tuple[str, int, frozenset[str]]:
    """The process of a role that has most cameras, its process id, and those cameras."""
    owners = {camera.name: getattr(camera.status, role, "") for camera in stage.fleet.cameras.values()}
    count = Counter(owner for owner in owners.values() if owner in stage.processes)
    if not count:
        raise SightlineError(f"no {role} has a camera yet; let the cluster warm up for longer")
    victim, _ = count.most_common(1)[0]
    return victim, stage.processes[victim], frozenset(name for name, owner in owners.items() if owner == victim)


def _process(stage: Stage, name: str) -> int:
    if name not in stage.processes:
        raise SightlineError(f"this cluster has no process {name!r} to do anything to")
    return stage.processes[name]


class _Kill(Fault):
    role: ClassVar[str]

    async def strike(self, stage: Stage) -> Strike:
        if self.role in ("replica", "decoder"):
            victim, pid, cameras = _busiest(stage, self.role)
        else:
            victim, pid, cameras = self.role, _process(stage, self.role), frozenset(stage.fleet.cameras)
        os.kill(pid, signal.SIGKILL)
        return Strike(victim, cameras)


class _Freeze(Fault):
    role: ClassVar[str]
    hold_s = 3.0

    async def strike(self, stage: Stage) -> Strike:
        victim, pid, cameras = _busiest(stage, self.role)
        os.kill(pid, signal.SIGSTOP)

        async def go_on() -> None:
            # The cluster may have replaced it meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return Strike(victim, cameras, go_on)


@faults.register("kill-replica")
class KillReplica(_Kill):
    """The replica with most cameras."""

    about = "kills the replica that has most cameras"
    role = "replica"


@faults.register("kill-decoder")
class KillDecoder(_Kill):
    """The decoder with most cameras."""

    about = "kills the decoder that has most cameras"
    role = "decoder"


@faults.register("kill-gateway")
class KillGateway(_Kill):
    """Every camera and everyone who listens is connected to it."""

    about = "kills the gateway, and with it every connection"
    role = "gateway"


@faults.register("kill-controller")
class KillController(_Kill):
    """No camera should notice."""

    about = "kills the controller; no camera should notice"
    role = "controller"


@faults.register("kill-tier")
class KillTier(_Kill):
    """Memories are out of reach for a while; no window should notice."""

    about = "kills the node's tier process, which memories are in; no window should notice"
    role = "tier"


@faults.register("kill-redis")
class KillRedis(_Kill):
    """A Redis that the load test started for the cluster; it stays dead."""

    about = "kills the Redis that the load test started for the cluster's memories; no window should notice"
    role = "redis"


@faults.register("freeze-replica")
class FreezeReplica(_Freeze):
    """SIGSTOP, then SIGCONT."""

    about = f"stops the replica with most cameras for {_Freeze.hold_s:g} s, as a machine that swaps"
    role = "replica"


@faults.register("freeze-decoder")
class FreezeDecoder(_Freeze):
    """SIGSTOP, then SIGCONT."""

    about = f"stops the decoder with most cameras for {_Freeze.hold_s:g} s"
    role = "decoder"


# -- the way there ------------------------------------------------------------------------------
@faults.register("packet-loss")
class PacketLoss(Fault):
    """Packets of every camera go missing before they are sent; their numbers say so."""

    about = "loses one packet in twenty of every camera for some seconds"
    hold_s = 8.0
    only_own = False
    share: ClassVar[float] = 0.05

    async def strike(self, stage: Stage) -> Strike:
        before = stage.fleet.loss
        stage.fleet.loss = self.share

        async def end() -> None:
            stage.fleet.loss = before

        return Strike("the network", frozenset(stage.fleet.cameras), end)


@faults.register("cut-connections")
class CutConnections(Fault):
    """As when a switch restarts."""

    about = "breaks every camera's connection at once"
    only_own = False

    async def strike(self, stage: Stage) -> Strike:
        return Strike("every connection", frozenset(stage.fleet.storm(1.0)))
