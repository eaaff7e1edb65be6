"""Faults that a load test injects under load, by name: processes that die or stop, packets and connections lost."""

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
LOOK_S = 0.1
FREEZE_S = 3.0
LOSS_S, LOSS_SHARE = 8.0, 0.05


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault as it was done. ``victim``: to whom; ``cameras``: those that live there, all others are left alone;
    ``heal``: what ends it."""

    victim: str
    cameras: frozenset[str]
    heal: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Fault:
    """``about``: one sentence for people; ``strike``: does it, or raises ``SightlineError`` when there is nobody to do
    it to; ``hold_s``: seconds until it is healed; ``only_own``: to no cluster that the load test did not start."""

    about: str
    strike: Callable[[Stage], Strike]
    hold_s: float = 0.0
    only_own: bool = True


async def inflict(stage: Stage, name: str) -> FaultResult:
    """Do one fault and wait until all of its cameras are on time again, or for so long that they will not be. Raises
    ``ConfigError``: there is no such fault, or it needs a cluster of the load test's own; ``SightlineError``: there was
    nobody to do it to."""
    fault = faults.get(name)
    if fault.only_own and not stage.target.own:
        raise ConfigError(
            f"the fault {name} needs a cluster that the load test starts itself; leave --gateway out and give --config"
        )
    await stage.look_at_processes()
    await stage.fleet.statuses()
    at_s = time.monotonic()
    strike = fault.strike(stage)
    try:
        await asyncio.sleep(fault.hold_s)
    finally:
        strike.heal()
    return FaultResult(
        name=name,
        victim=strike.victim,
        at_s=at_s - stage.began_s,
        struck=len(strike.cameras),
        recovery_s=await _recovery(stage, strike, at_s) - at_s,
        stride_s=stage.setup.stride_s,
    )


async def _recovery(stage: Stage, strike: Strike, at_s: float) -> float:
    """The moment from which on all cameras of the strike were on time that have not left meanwhile; infinite when that
    did not come, or none of them is there."""
    stride_s = stage.setup.stride_s
    deadline_s = time.monotonic() + max(PATIENCE_S, PATIENCE_STRIDES * stride_s)
    while time.monotonic() < deadline_s:
        now_s = time.monotonic()
        there = [camera for name, camera in stage.fleet.cameras.items() if name in strike.cameras]
        moments = [camera.ledger.on_time_since(at_s, now_s) for camera in there]
        known = [moment for moment in moments if moment is not None]
        # All of a stride must have passed, or a window under way when it happened could be taken for recovery.
        if known and len(known) == len(moments) and now_s - max(known) >= stride_s:
            return max(known)
        await asyncio.sleep(LOOK_S)
    return math.inf


def _busiest(stage: Stage, role: str) -> tuple[str, int, frozenset[str]]:
    """The process of a role that has most cameras, its process id, and those cameras."""
    owners = {camera.name: getattr(camera.status, role, "") for camera in stage.fleet.cameras.values()}
    count = Counter(owner for owner in owners.values() if owner in stage.processes)
    if not count:
        raise SightlineError(f"no {role} has a camera yet; let the cluster warm up for longer")
    victim, _ = count.most_common(1)[0]
    return victim, stage.processes[victim], frozenset(name for name, owner in owners.items() if owner == victim)


def _kill_busiest(role: str, stage: Stage) -> Strike:
    victim, pid, cameras = _busiest(stage, role)
    os.kill(pid, signal.SIGKILL)
    return Strike(victim, cameras)


def _kill(name: str, stage: Stage) -> Strike:
    if name not in stage.processes:
        raise SightlineError(f"this cluster has no process {name!r} to do anything to")
    os.kill(stage.processes[name], signal.SIGKILL)
    return Strike(name, frozenset(stage.fleet.cameras))


def _freeze(role: str, stage: Stage) -> Strike:
    victim, pid, cameras = _busiest(stage, role)
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        # The cluster may have replaced it meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return Strike(victim, cameras, go_on)


def _lose_packets(stage: Stage) -> Strike:
    """Packets go missing before they are sent; their numbers say so."""
    before, stage.fleet.loss = stage.fleet.loss, LOSS_SHARE

    def end() -> None:
        stage.fleet.loss = before

    return Strike("the network", frozenset(stage.fleet.cameras), end)


faults: Registry[Fault] = Registry(
    "fault",
    {
        "kill-replica": Fault("kills the replica that has most cameras", partial(_kill_busiest, "replica")),
        "kill-decoder": Fault("kills the decoder that has most cameras", partial(_kill_busiest, "decoder")),
        "kill-gateway": Fault("kills the gateway, and with it every connection", partial(_kill, "gateway")),
        "kill-controller": Fault("kills the controller; no camera should notice", partial(_kill, "controller")),
        "kill-tier": Fault(
            "kills the node's tier process, which memories are in; no window should notice", partial(_kill, "tier")
        ),
        "kill-redis": Fault(
            "kills the Redis that the load test started for the cluster's memories; no window should notice",
            partial(_kill, "redis"),
        ),
        "freeze-replica": Fault(
            f"stops the replica with most cameras for {FREEZE_S:g} s, as a machine that swaps",
            partial(_freeze, "replica"),
            hold_s=FREEZE_S,
        ),
        "freeze-decoder": Fault(
            f"stops the decoder with most cameras for {FREEZE_S:g} s", partial(_freeze, "decoder"), hold_s=FREEZE_S
        ),
        "packet-loss": Fault(
            "loses one packet in twenty of every camera for some seconds",
            _lose_packets,
            hold_s=LOSS_S,
            only_own=False,
        ),
        "cut-connections": Fault(
            "breaks every camera's connection at once, as when a switch restarts",
            lambda stage: Strike("every connection", frozenset(stage.fleet.storm(1.0))),
            only_own=False,
        ),
    },
)
