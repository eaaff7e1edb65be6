"""Sightline on two Ray nodes of this machine, as the chart deploys it: processes and whole nodes die, and every window
is judged from outside.

Each node has a decoder, a replica and a tier. Gateway, controller and alerting begin on the first one.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from process_faults import (
    Before,
    Counts,
    answering_s,
    counts_of,
    known_incidents,
    memory_of,
    missed_incidents,
    remembers,
)
from serve_parts import chart_serve_config, deploy, gateway_ports, ray_cluster, until_running
from small_cluster import BLOCK_FRAMES, is_alive
from watched_cameras import STRIDE_S, WatchedCameras

from cluster.errors import SightlineError
from cluster.lab.bench.processes import RedisServer

CAMERAS = ("dock", "gate", "hall", "lane", "yard")
HEARTBEAT_S = 0.25
FREEZE_S = 20.0
REDIS_GONE_S = 20.0
RESTART_S = 45.0
WELL_S = 240.0
SETTLE_S = 60.0
STEADY_S = 6 * HEARTBEAT_S
POLL_S = 0.2

TITLES = {
    "decoder": "ray::Decoder",
    "replica": "ray::ServeReplica:replicas",
    "controller": "ray::Controller",
    "gateway": "ray::Gateway",
    "tier": "ray::TierNode",
    "alerting": "ray::Alerting",
    "dashboard-agent": "ray::DashboardAgent",
    "runtime-env-agent": "ray::RuntimeEnvAgent",
}
"""Process -> how its title begins."""

PROCESSES = {"decoder": 2, "replica": 2, "controller": 1, "gateway": 1, "tier": 2, "alerting": 1}

NODE = {"sightline_decoder": 1.0, "sightline_replica": 1.0}
CONTROL = {"sightline_control": 16.0}


@dataclass(frozen=True, slots=True)
class Windows:
    """Of one camera, since before a fault. ``seen`` came out of the gateway, ``said`` are answered as the cluster
    counts, ``counted`` it says were dropped or lost; ``pieces``: windows that were cut short, which never were due but
    may be counted."""

    due: int
    seen: int
    said: int
    counted: int
    pieces: int

    def exact(self, *, watched: bool, known: bool = True) -> bool:
        """Every window was answered or counted, and none twice; but a replica that dies may not have reported the last
        one that it answered.

        Args:
            watched: answers could not go unheard.
            known: somebody is left who knows what was answered and counted before the fault.
        """
        most = self.due + self.pieces
        if not known:
            return self.due - 1 <= self.seen + self.counted <= most
        heard = not watched or self.due <= self.seen + self.counted <= most
        return heard and self.due - 1 <= self.said + self.counted <= most


class TwoNodes(WatchedCameras):
    """A context manager, used from one thread; at its end nothing of it is left.

    Args:
        folder: of its files and logs.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._stack = ExitStack()
        self.redis = self._stack.enter_context(RedisServer())
        try:
            self._add, self._kill = self._stack.enter_context(ray_cluster())
            self.nodes = [self._add(NODE | CONTROL), self._add(NODE)]
            gateway, ports = gateway_ports()
            deploy(self._configuration(ports))
            until_running()
            self.begin(gateway, CAMERAS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.stop_pushing()
        self._stack.close()
        self.end()

    def _configuration(self, ports: tuple[int, int]) -> dict[str, Any]:
        config = chart_serve_config(
            self.folder,
            self.clip,
            *("decoders.pods=2", "replicas.pods=2"),
            *(f"config.window.length_s={2 * STRIDE_S:g}", f"config.window.stride_s={STRIDE_S:g}"),
            f"config.memory.block_frames={BLOCK_FRAMES}",
            ports=ports,
        )
        for application in config["applications"]:
            body = application["args"]["configuration"]
            body["tiers"] = {"redis_url": self.redis.url}
            body["cluster"] |= {"log_dir": str(self.folder / "logs"), "heartbeat_s": HEARTBEAT_S}
        full = config["applications"][0]["args"]["configuration"]
        full["cameras"] = []
        full["alerts"] |= {"update_s": STRIDE_S, "cooldown_s": 0, "sinks": [{"name": "log", "kind": "log"}]}
        full["clips"] = {"keep_free": 0, "before_s": 2, "after_s": 2}
        return config

    # -- processes ------------------------------------------------------------------------------
    def processes(self, role: str, node: Any = None) -> list[psutil.Process]:
        """Those of a kind (``TITLES``), of one node or of both, the busiest first."""
        above = psutil.Process() if node is None else raylet(node)
        found: list[tuple[float, psutil.Process]] = []
        for process in above.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = process.cmdline()[:1]
                if is_alive(process) and title and title[0].startswith(TITLES[role]):
                    found.append((sum(process.cpu_times()[:2]), process))
        return [process for _, process in sorted(found, key=lambda pair: -pair[0])]

    def lose(self, node: Any, victims: list[psutil.Process]) -> None:
        """A node ends with its raylet, which some of its processes take along."""
        self.nodes.remove(node)
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        deadline_s = time.monotonic() + RESTART_S
        while is_alive(raylet(node)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        self._kill(node)

    def replace(self) -> None:
        """Another node comes in place of one that was lost, and may have any process."""
        if len(self.nodes) < 2:
            self.nodes.append(self._add(NODE | CONTROL))

    def trouble(self) -> str:
        """Why it is not well: a process is missing, or a camera is late, has no incident or remembers nothing."""
        now_s = time.monotonic()
        for role, count in PROCESSES.items():
            if (found := len(self.processes(role))) != count:
                return f"{found} of {count} {role} processes run"
        replicas = self.client.replicas_and_decoders()[0]
        if len(replicas) != PROCESSES["replica"]:
            return f"{len(replicas)} replicas take cameras"
        incidents = known_incidents(self)
        for name, camera in self.cameras.items():
            if camera.done.done():
                return f"{name} does not push any more: {camera.done.exception()}"
            if camera.ledger.on_time_since(now_s - 3 * STRIDE_S, now_s) is None:
                return f"{name} is not answered on time"
            if memory_of(self, name).frames <= BLOCK_FRAMES:
                return f"{name} remembers nothing yet"
            if name not in incidents.values():
                return f"{name} has no incident"
        return ""

    def wait_until_well(self) -> None:
        """Raises ``SightlineError`` when that takes too long."""
        deadline_s = time.monotonic() + WELL_S
        trouble = "it does not answer"
        while time.monotonic() < deadline_s:
            with contextlib.suppress(SightlineError):
                if (trouble := self.trouble()) == "":
                    return
            # A look at everything takes the time of a small machine; what it finds comes with heartbeats.
            time.sleep(2 * HEARTBEAT_S)
        raise SightlineError(f"the cluster was not well within {WELL_S:g} s: {trouble}")


def raylet(node: Any) -> psutil.Process:
    """The process that all of a node's are children of."""
    [info] = node.all_processes["raylet"]
    return psutil.Process(info.process.pid)


# -- faults --------------------------------------------------------------------------------------
def _kill(*roles: str) -> Callable[[TwoNodes], float]:
    def cause(cluster: TwoNodes) -> float:
        victims = [each for role in roles for each in cluster.processes(role)]
        for process in victims if len(roles) > 1 else victims[:1]:
            process.kill()
        return RESTART_S

    return cause


def _freeze(role: str) -> Callable[[TwoNodes], float]:
    def cause(cluster: TwoNodes) -> float:
        victim = cluster.processes(role)[0]
        victim.send_signal(signal.SIGSTOP)
        time.sleep(FREEZE_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGCONT)
        return RESTART_S

    return cause


def _redis(cluster: TwoNodes) -> float:
    cluster.redis.kill()
    time.sleep(REDIS_GONE_S)
    cluster.redis.start()
    return 0.0


def _node(role: str = "", *, control: bool = False) -> Callable[[TwoNodes], float]:
    """A node is gone at once, as when its machine loses power; with ``role``, this process of its alone is killed, with
    which Ray ends a node."""

    def cause(cluster: TwoNodes) -> float:
        node = next(each for each in cluster.nodes if bool(cluster.processes("controller", each)) is control)
        above = raylet(node)
        everything = [above, *above.children(recursive=True)]
        cluster.lose(node, {"": everything, "raylet": [above]}.get(role) or cluster.processes(role, node))
        return RESTART_S

    return cause


FAULTS: Mapping[str, Callable[[TwoNodes], float]] = {
    **{f"kill-{role}": _kill(role) for role in PROCESSES},
    "kill-decoders-replicas": _kill("decoder", "replica"),
    **{f"freeze-{role}": _freeze(role) for role in PROCESSES},
    "redis-gone": _redis,
    "node": _node(),
    "node-with-control": _node(control=True),
    **{f"kill-{role}": _node(role) for role in ("raylet", "dashboard-agent", "runtime-env-agent")},
}
"""Fault -> what does it; it gives the seconds in which recovery is due."""


# -- judging -------------------------------------------------------------------------------------
def judge(cluster: TwoNodes, name: str) -> list[str]:
    """Do it to a cluster that is well; what was not as it should be afterwards."""
    cluster.wait_until_well()
    before = {camera: _before(cluster, camera) for camera in cluster.cameras}
    pieces = {camera: _pieces(cluster, camera) for camera in cluster.cameras}
    incidents = known_incidents(cluster)
    due_s = FAULTS[name](cluster)
    limit_s = due_s + 2 * STRIDE_S
    answering = answering_s(cluster, time.monotonic(), limit_s)
    late = sorted(camera for camera, after_s in answering.items() if after_s is None or after_s > limit_s)
    reasons = [f"{', '.join(late)} not answered within {limit_s:g} s"] if late else []
    cluster.replace()
    watched = name not in ("kill-gateway", "freeze-gateway")
    # A replica, its cameras' decoder and the controller die in the same moment.
    known = name != "node-with-control"
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        found = {camera: _windows(cluster, camera, each, pieces[camera]) for camera, each in before.items()}
        if all(each.exact(watched=watched, known=known) for each in found.values()) or time.monotonic() > deadline_s:
            break
    print(name, {camera: f"{after_s:.1f} s" for camera, after_s in answering.items() if after_s is not None}, found)
    reasons += [f"{camera}: {each}" for camera, each in found.items() if not each.exact(watched=watched, known=known)]
    forgot = [camera for camera, each in before.items() if not remembers(cluster, camera, each.memory)]
    reasons += [f"{', '.join(forgot)} forgot what was before"] if forgot else []
    return reasons + missed_incidents(cluster, incidents, "")


def _steady(cluster: TwoNodes, name: str) -> tuple[Counts, float]:
    """What is counted of a camera, and the end of its last window that was answered, while neither changes: heartbeats
    have told all of what was seen by then."""
    ledger = cluster.cameras[name].ledger
    deadline_s = time.monotonic() + WELL_S
    look: tuple[Counts, int] | None = None
    while time.monotonic() < deadline_s:
        before = look
        with contextlib.suppress(SightlineError):
            look = counts_of(cluster, name), ledger.seen
            if look == before:
                seen = [slot.end_s for slot in ledger.slots(time.monotonic()) if slot.seen_s is not None]
                return look[0], seen[-1]
        time.sleep(STEADY_S)
    raise SightlineError(f"the counts of {name} never stood still for {STEADY_S:g} s")


def _before(cluster: TwoNodes, name: str) -> Before:
    counts, end_s = _steady(cluster, name)
    return Before(end_s, counts, memory_of(cluster, name))


def _pieces(cluster: TwoNodes, name: str) -> int:
    """Windows of a camera so far that were begun and cut short."""
    ledger, now_s = cluster.cameras[name].ledger, time.monotonic()
    return ledger.most(now_s) - len(ledger.slots(now_s))


def _windows(cluster: TwoNodes, name: str, before: Before, pieces: int) -> Windows:
    counts, end_s = _steady(cluster, name)
    slots = cluster.cameras[name].ledger.slots(time.monotonic())
    slots = [slot for slot in slots if before.end_s + STRIDE_S / 2 < slot.end_s <= end_s]
    return Windows(
        due=len(slots),
        seen=sum(slot.seen_s is not None for slot in slots),
        said=counts.answered - before.counts.answered,
        counted=counts.given_up - before.counts.given_up,
        pieces=_pieces(cluster, name) - pieces,
    )
