"""Faults to inject under load, by name: killed or frozen processes, lost packets, broken connections."""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster.errors import ConfigError, SightlineError
from cluster.registry import Registry
from loadtest.result import FaultResult
from loadtest.stage import Stage

PATIENCE_STRIDES = 8.0
PATIENCE_S = 45.0
POLL_S = 0.1
FREEZE_S = 3.0
LOSS_S, LOSS_SHARE = 8.0, 0.05


@dataclass(frozen=True, slots=True)
class Injection:
    """An injected fault. ``victim``: what it hit; ``cameras``: the affected ones; ``heal``: ends the fault."""

    victim: str
    cameras: frozenset[str]
    heal: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault. ``about``: description; ``inject``: injects it, or raises ``SightlineError`` if there is no
    target; ``hold_s``: seconds until it is healed; ``only_own``: only for clusters started by the load test."""

    about: str
    inject: Callable[[Stage], Injection]
    hold_s: float = 0.0
    only_own: bool = True


async def inject(stage: Stage, name: str) -> FaultResult:
    """Inject one fault and wait until all affected cameras are on time again, or until the patience runs out. Raises
    ``ConfigError``: unknown fault, or one that needs a cluster started by the load test; ``SightlineError``: there is
    no target for it."""
    fault = faults.get(name)
    if fault.only_own and not stage.target.own:
        raise ConfigError(
            f"the fault {name} needs a cluster started by the load test; use --config instead of --gateway"
        )
    await stage.refresh_processes()
    await stage.fleet.statuses()
    at_s = time.monotonic()
    injection = fault.inject(stage)
    try:
        await asyncio.sleep(fault.hold_s)
    finally:
        injection.heal()
    return FaultResult(
        name=name,
        victim=injection.victim,
        at_s=at_s - stage.began_s,
        struck=len(injection.cameras),
        recovery_s=await _recovery(stage, injection, at_s) - at_s,
        stride_s=stage.stride_s,
    )


async def _recovery(stage: Stage, injection: Injection, at_s: float) -> float:
    """Monotonic time since when all affected cameras that have not left are on time; infinite if the patience runs out
    first, or if none is left."""
    stride_s = stage.stride_s
    deadline_s = time.monotonic() + max(PATIENCE_S, PATIENCE_STRIDES * stride_s)
    while time.monotonic() < deadline_s:
        now_s = time.monotonic()
        there = [camera for name, camera in stage.fleet.cameras.items() if name in injection.cameras]
        if not there:
            break
        moments = [camera.ledger.on_time_since(at_s, now_s) for camera in there]
        known = [moment for moment in moments if moment is not None]
        # Wait for a full stride, or a window in flight when the fault struck could be mistaken for recovery.
        if len(known) == len(moments) and now_s - max(known) >= stride_s:
            return max(known)
        await asyncio.sleep(POLL_S)
    return math.inf


def _busiest(stage: Stage, role: str) -> tuple[str, int, frozenset[str]]:
    """Name, process id and cameras of the process of ``role`` that serves most cameras."""
    owners = {camera.name: getattr(camera.status, role, "") for camera in stage.fleet.cameras.values()}
    count = Counter(owner for owner in owners.values() if owner in stage.processes)
    if not count:
        raise SightlineError(f"no {role} serves a camera yet; let the cluster warm up longer")
    victim, _ = count.most_common(1)[0]
    return victim, stage.processes[victim], frozenset(name for name, owner in owners.items() if owner == victim)


def _kill_busiest(role: str, stage: Stage) -> Injection:
    victim, pid, cameras = _busiest(stage, role)
    os.kill(pid, signal.SIGKILL)
    return Injection(victim, cameras)


def _kill(name: str, stage: Stage) -> Injection:
    if name not in stage.processes:
        raise SightlineError(f"this cluster has no process {name!r} to kill")
    os.kill(stage.processes[name], signal.SIGKILL)
    return Injection(name, frozenset(stage.fleet.cameras))


def _freeze(role: str, stage: Stage) -> Injection:
    victim, pid, cameras = _busiest(stage, role)
    os.kill(pid, signal.SIGSTOP)

    def resume() -> None:
        # The cluster may have replaced the process meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return Injection(victim, cameras, resume)


def _lose_packets(stage: Stage) -> Injection:
    """Lose packets before they are sent, which leaves gaps in their sequence numbers."""
    before, stage.fleet.loss = stage.fleet.loss, LOSS_SHARE

    def end() -> None:
        stage.fleet.loss = before

    return Injection("the network", frozenset(stage.fleet.cameras), end)


faults: Registry[Fault] = Registry(
    "fault",
    {
        "kill-replica": Fault("kills the replica with most cameras", partial(_kill_busiest, "replica")),
        "kill-decoder": Fault("kills the decoder with most cameras", partial(_kill_busiest, "decoder")),
        "kill-gateway": Fault("kills the gateway, and with it every connection", partial(_kill, "gateway")),
        "kill-controller": Fault("kills the controller; no camera should be affected", partial(_kill, "controller")),
        "kill-tier": Fault(
            "kills the node's tier process, which holds memories; no window should be affected", partial(_kill, "tier")
        ),
        "kill-redis": Fault(
            "kills the Redis that the load test started for the cluster's memories; no window should be affected",
            partial(_kill, "redis"),
        ),
        "freeze-replica": Fault(
            f"stops the replica with most cameras for {FREEZE_S:g} s, as if its machine were swapping",
            partial(_freeze, "replica"),
            hold_s=FREEZE_S,
        ),
        "freeze-decoder": Fault(
            f"stops the decoder with most cameras for {FREEZE_S:g} s", partial(_freeze, "decoder"), hold_s=FREEZE_S
        ),
        "packet-loss": Fault(
            f"loses {LOSS_SHARE:.0%} of every camera's packets for {LOSS_S:g} s",
            _lose_packets,
            hold_s=LOSS_S,
            only_own=False,
        ),
        "cut-connections": Fault(
            "breaks all cameras' connections at once, as when a switch restarts",
            lambda stage: Injection("every connection", frozenset(stage.fleet.storm(1.0))),
            only_own=False,
        ),
    },
)
