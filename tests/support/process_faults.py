"""faults_survived: a small real cluster whose processes are killed and frozen, and which is judged from outside.

A fault is survived when

* every camera is answered again within two strides after recovery is due: after ``RESTART_S`` where a process has to be
  started anew, at once where one goes on, after its first stride where a camera was added;
* of the windows due from the last answer before the fault to the last one after it, every one was answered or counted,
  and none twice: due = answered + counted, ± 1 for each camera, by what came out of the gateway (unless that was the
  target) and by what the cluster says;
* cameras remember frames from before it, and no more is missing than the frames that were in no block yet;
* the incidents that were open are still known, and the camera that was added again has a new one.

A fault of the cluster itself is survived when ``serve`` is gone within ``END_S``, with one line that says what died,
exit code 1 and no process left behind.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from small_cluster import BLOCK_FRAMES, CAMERAS, PROCESSES, SmallCluster
from watched_cameras import STRIDE_S, WatchedCameras

from cluster.client import GatewayClient
from cluster.errors import SightlineError
from cluster.lab.bench.harness import BenchResult
from cluster.types import MICROSECONDS, MemoryStatus

FREEZE_S = 20.0
REDIS_GONE_S = 40.0
DISK_FULL_S = 20.0
FILL_S = 0.005
RESTART_S = 30.0
END_S = 20.0
WARM_S = 34.0
"""A camera has memories by then, and as many windows as make a second life under its name differ from the first."""

PATIENCE_S = 60.0
POLL_S = 0.25

ENDS = ("raylet", "dashboard-agent", "runtime-env-agent")

FAULTS: dict[str, tuple[str, str]] = {
    "re-add": ("re-add", CAMERAS[0]),
    **{f"{action}-{role}": (action, role) for role in PROCESSES for action in ("kill", "freeze")},
    "kill-decoders-replicas": ("kill", "decoder replica"),
    "redis-gone": ("redis", "redis"),
    "disk-full": ("disk", "disk"),
    **{f"kill-{name}": ("end", name) for name in ENDS},
}
"""Fault -> what is done, and to whom."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the cluster says of a camera's windows."""

    answered: int
    given_up: int


@dataclass(frozen=True, slots=True)
class Before:
    """A camera when the fault begins. ``end_s``: of its last window that was answered, monotonic."""

    end_s: float
    counts: Counts
    memory: MemoryStatus


@dataclass(frozen=True, slots=True)
class Windows:
    """Of one camera, from before a fault until after it. ``seen`` came out of the gateway, ``said`` are answered as the
    cluster counts, ``counted`` it says were dropped or lost."""

    due: int
    seen: int
    said: int
    counted: int

    def balanced(self, *, watched: bool) -> bool:
        """``watched``: answers could not go unheard."""
        unseen = abs(self.due - self.seen - self.counted) if watched else 0
        return max(unseen, abs(self.due - self.said - self.counted)) <= 1


def measure(seed: int, *, names: Collection[str] = (), repeat: int = 1, folder: Path | None = None) -> BenchResult:
    """Every fault ``repeat`` times, one after the other, on clusters that had recovered before; nothing is drawn."""
    del seed
    chosen = [name for name in FAULTS if not names or name in names]
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sightline-faults-")))
        for round_ in range(repeat):
            rows += _round(chosen, root / str(round_))
    survived = sum(row["verdict"] == "survived" for row in rows)
    return BenchResult({"faults_survived": survived / len(rows)}, rows)


def _round(names: Collection[str], folder: Path) -> list[dict[str, Any]]:
    rows = []
    cluster: SmallCluster | None = None
    try:
        for name in names:
            if cluster is None:
                cluster = SmallCluster(folder / name)
            row = _row(cluster, name)
            print(f"{name}: {row['verdict']}{': ' if row['reason'] else ''}{row['reason']}", flush=True)
            rows.append(row)
            if row["verdict"] != "survived" or FAULTS[name][0] == "end":
                # What one fault has broken is not held against the next.
                cluster.close()
                cluster = None
    finally:
        if cluster is not None:
            cluster.close()
    return rows


def _row(cluster: SmallCluster, name: str) -> dict[str, Any]:
    action, target = FAULTS[name]
    found: dict[str, Any] = {"answering_s": None, "due": None, "answered": None, "counted": None, "memories": None}
    try:
        _wait_until_well(cluster)
        reasons = _end(cluster, target, found) if action == "end" else _judge(cluster, action, target, found)
    except SightlineError as error:
        reasons = [str(error)]
    verdict = "lost" if reasons else "survived"
    return {"fault": name, "target": target, **found, "verdict": verdict, "reason": "; ".join(reasons)}


# -- faults the cluster lives through -----------------------------------------------------------
def _judge(cluster: SmallCluster, action: str, target: str, found: dict[str, Any]) -> list[str]:
    before = {name: take_before(cluster, name) for name in cluster.cameras}
    incidents = known_incidents(cluster)
    healed_s, due_s, reasons = _cause(cluster, action, target)
    limit_s = due_s + 2 * STRIDE_S
    answering = answering_s(cluster, healed_s, limit_s)
    late = sorted(name for name, after_s in answering.items() if after_s is None or after_s > limit_s)
    if late:
        reasons.append(f"{', '.join(late)} not answered within {limit_s:g} s")
    found["answering_s"] = None if None in answering.values() else max(filter(None, answering.values()), default=0.0)
    if action == "re-add":
        before[target] = Before(cluster.cameras[target].ledger.began_s, Counts(0, 0), before[target].memory)
    windows = _settled_windows(cluster, before, watched=target != "gateway")
    for name, each in windows.items():
        if not each.balanced(watched=target != "gateway"):
            reasons.append(f"{name}: {each.due} due, {each.seen} seen, {each.said} answered, {each.counted} counted")
    found["due"] = sum(each.due for each in windows.values())
    found["answered"] = sum(each.said for each in windows.values())
    found["counted"] = sum(each.counted for each in windows.values())
    others = {name: each for name, each in before.items() if action != "re-add" or name != target}
    forgot = [name for name, each in others.items() if not remembers(cluster, name, each.memory)]
    found["memories"] = f"{len(others) - len(forgot)} of {len(others)}"
    if forgot:
        reasons.append(f"{', '.join(forgot)} forgot what was before")
    return reasons + missed_incidents(cluster, incidents, target if action == "re-add" else "")


def _cause(cluster: SmallCluster, action: str, target: str) -> tuple[float, float, list[str]]:
    """Do it and undo it; when that was, in how many seconds from then recovery is due, and what went wrong."""
    if action == "re-add":
        cluster.remove(target)
        cluster.add(target)
        return time.monotonic(), STRIDE_S, []
    if action == "redis":
        cluster.redis.kill()
        time.sleep(REDIS_GONE_S)
        cluster.redis.start()
        return time.monotonic(), 0.0, []
    if action == "disk":
        return _fill_disk(cluster)
    roles = target.split()
    if len(roles) > 1:
        # Every one, so that no camera has a survivor.
        for victim in [process for role in roles for process in cluster.processes(role)]:
            victim.kill()
        return time.monotonic(), RESTART_S, []
    victim = cluster.processes(target)[0]
    if action == "kill":
        victim.kill()
        return time.monotonic(), RESTART_S, []
    victim.send_signal(signal.SIGSTOP)
    time.sleep(FREEZE_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGCONT)
        return time.monotonic(), 0.0, []
    # The cluster did not wait for it.
    return time.monotonic(), RESTART_S, []


def _fill_disk(cluster: SmallCluster) -> tuple[float, float, list[str]]:
    alerting = cluster.processes("alerting")[0].pid
    until_s = time.monotonic() + DISK_FULL_S
    full = ""
    with GatewayClient(cluster.gateway) as client:
        while time.monotonic() < until_s:
            look_s = time.monotonic() + POLL_S
            while time.monotonic() < look_s:
                # Old clips go to make room, which must not stay.
                cluster.fill_disk()
                time.sleep(FILL_S)
            full = full or client.outbox().trouble
        cluster.empty_disk()
        healed_s = time.monotonic()
        time.sleep(DISK_FULL_S)
        after = client.outbox()
    reasons = [] if full else ["nobody noticed that the disk was full"]
    if after.trouble or after.unwritten or after.lost:
        reasons.append(f"alerts are not on the disk: {after.trouble}, {after.unwritten} unwritten, {after.lost} lost")
    if alerting != cluster.processes("alerting")[0].pid:
        reasons.append("alerting died")
    return healed_s, 0.0, reasons


def take_before(cluster: WatchedCameras, name: str) -> Before:
    """A camera as it is now, which has been answered."""
    # What was counted first: a window that is answered in between must not be taken for one from before.
    counts = counts_of(cluster, name)
    slots = [slot for slot in cluster.cameras[name].ledger.slots(time.monotonic()) if slot.seen_s is not None]
    return Before(slots[-1].end_s, counts, memory_of(cluster, name))


def counts_of(cluster: WatchedCameras, name: str) -> Counts:
    status = cluster.client.camera_get(name)
    return Counts(status.windows_done + status.windows_gated, status.windows_dropped + status.windows_lost)


def memory_of(cluster: WatchedCameras, name: str) -> MemoryStatus:
    with GatewayClient(cluster.gateway) as client:
        return client.memory(name)


def answering_s(cluster: WatchedCameras, since_s: float, limit_s: float) -> dict[str, float | None]:
    """Seconds from ``since_s`` to the answer of a window that ended after it, by camera; ``None``: it did not come."""
    found: dict[str, float | None] = dict.fromkeys(cluster.cameras)
    deadline_s = since_s + limit_s + PATIENCE_S
    while None in found.values() and time.monotonic() < deadline_s:
        for name, camera in cluster.cameras.items():
            slots = camera.ledger.slots(time.monotonic())
            seen = [slot.seen_s for slot in slots if slot.end_s > since_s and slot.seen_s is not None]
            found[name] = min(seen) - since_s if seen else None
        time.sleep(POLL_S)
    return found


def _settled_windows(cluster: SmallCluster, before: Mapping[str, Before], *, watched: bool) -> dict[str, Windows]:
    """As soon as all are balanced, or as they are after three strides: counts come with heartbeats."""
    deadline_s = time.monotonic() + 3 * STRIDE_S
    while True:
        with contextlib.suppress(SightlineError):
            windows = {name: count_windows(cluster, name, each) for name, each in before.items()}
            if all(each.balanced(watched=watched) for each in windows.values()) or time.monotonic() > deadline_s:
                return windows
        if time.monotonic() > deadline_s + PATIENCE_S:
            raise SightlineError("the cluster does not say what became of its windows")
        time.sleep(POLL_S)


def count_windows(cluster: WatchedCameras, name: str, before: Before) -> Windows:
    """What became of its windows since."""
    counts = counts_of(cluster, name)
    now_s = time.monotonic()
    slots = [slot for slot in cluster.cameras[name].ledger.slots(now_s) if slot.end_s > before.end_s + STRIDE_S / 2]
    # A window that ended just now has its answer under way; before that, silence is a window that is missing.
    while slots and slots[-1].seen_s is None and slots[-1].end_s > now_s - 2 * STRIDE_S:
        slots.pop()
    return Windows(
        due=len(slots),
        seen=sum(slot.seen_s is not None for slot in slots),
        said=counts.answered - before.counts.answered,
        counted=counts.given_up - before.counts.given_up,
    )


def remembers(cluster: WatchedCameras, name: str, before: MemoryStatus) -> bool:
    """Whether frames from before are held, all but those that were in no block yet."""
    try:
        after = memory_of(cluster, name)
    except SightlineError:
        return False
    second = MICROSECONDS
    return after.oldest <= before.oldest + second and after.frames >= before.frames - BLOCK_FRAMES > 0


def known_incidents(cluster: WatchedCameras, *, only_open: bool = True) -> dict[str, str]:
    """Incident -> its camera."""
    with GatewayClient(cluster.gateway) as client:
        found = client.incidents(only_open=only_open)
    return {each.id: each.camera for each in found if each.kind == "question"}


def missed_incidents(cluster: WatchedCameras, before: Mapping[str, str], added: str) -> list[str]:
    """Incidents may have ended, where there was no answer for a while, but are known; ``added`` has a new one."""
    deadline_s = time.monotonic() + 3 * STRIDE_S
    while True:
        with contextlib.suppress(SightlineError):
            known, now = known_incidents(cluster, only_open=False), known_incidents(cluster)
            wrong = [name for incident, name in before.items() if name != added and incident not in known]
            if added and added not in {name for incident, name in now.items() if incident not in before}:
                wrong.append(added)
            if not wrong:
                return []
            if time.monotonic() > deadline_s:
                return [f"incidents of {', '.join(wrong)} are not what they should be"]
        if time.monotonic() > deadline_s + PATIENCE_S:
            return ["incidents cannot be asked for"]
        time.sleep(POLL_S)


def _wait_until_well(cluster: SmallCluster) -> None:
    """Until every process is there and every camera has memories, an incident and answers on time."""
    deadline_s = time.monotonic() + WARM_S + 2 * PATIENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(SightlineError):
            if _trouble(cluster) == "":
                return
        if cluster.serve.poll() is not None:
            raise SightlineError("the cluster has ended")
        time.sleep(POLL_S)
    raise SightlineError(f"the cluster was not well before the fault: {_trouble(cluster)}")


def _trouble(cluster: SmallCluster) -> str:
    now_s = time.monotonic()
    for role, count in PROCESSES.items():
        if (found := len(cluster.processes(role))) != count:
            return f"{found} of {count} {role} processes run"
    incidents = known_incidents(cluster)
    for name, camera in cluster.cameras.items():
        if camera.done.done():
            return f"{name} does not push any more: {camera.done.exception()}"
        if now_s - camera.ledger.began_s < WARM_S:
            return f"{name} has only just begun"
        if camera.ledger.on_time_since(now_s - 3 * STRIDE_S, now_s) is None:
            return f"{name} is not answered on time"
        if memory_of(cluster, name).frames <= BLOCK_FRAMES:
            return f"{name} remembers nothing yet"
        if name not in incidents.values():
            return f"{name} has no incident"
    return ""


# -- faults of the cluster itself ---------------------------------------------------------------
def _end(cluster: SmallCluster, target: str, found: dict[str, Any]) -> list[str]:
    said = len(cluster.output.read_text().splitlines())
    cluster.processes(target)[0].kill()
    found["memories"] = "-"
    try:
        code = cluster.serve.wait(END_S)
    except subprocess.TimeoutExpired:
        return [f"serve still runs {END_S:g} s after it"]
    reasons = [] if code == 1 else [f"exit code {code}"]
    lines = cluster.output.read_text().splitlines()[said:]
    if len(lines) != 1 or not lines[0].startswith("error: "):
        reasons.append(f"it said {' / '.join(lines) or 'nothing'}")
    if left := cluster.left():
        reasons.append(f"{len(left)} processes are left behind")
    return reasons
