"""``sightline doctor --gateway``: what is wrong with a running cluster, as its gateway says, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from actors.cli.output import size
from cluster.errors import NotReadyError, SightlineError
from cluster.redaction import redact

if TYPE_CHECKING:
    from cluster.alerts.dispatcher import Outbox
    from cluster.client import GatewayClient
    from cluster.types import CameraStatus
    from cluster.types.reports import ReplicaStatus

BEHIND_S = 30.0
MOST_DROPPED = 0.05
MOST_NAMED = 5
MOST_DEAD = 1000
SILENT = (
    (("backoff", "error"), "wrong", "correct the source: sightline cameras test SOURCE"),
    (("waiting", "connecting"), "warning", "see States of a camera in docs/operations.md"),
)


class Finding(NamedTuple):
    """``state``: ok, warning or wrong; ``remedy``: empty with ok."""

    what: str
    state: str
    found: str
    remedy: str = ""


def cluster_findings(client: GatewayClient) -> Iterator[Finding]:
    """Every check, in order; ``wrong`` with the reason where the gateway does not answer one."""
    try:
        cameras = client.cameras_list()
    except SightlineError as error:
        found, _, remedy = str(error).partition("; ")
        yield Finding("gateway", "wrong", found, remedy or "start it, or name its address")
        return
    yield Finding("gateway", "ok", f"answers at {client.address}")
    yield from camera_findings(cameras)
    yield from _asked("replicas", lambda: replica_findings(client.replicas_list()))
    yield from _asked("alerts", lambda: _alerts(client))


def _alerts(client: GatewayClient) -> Iterator[Finding]:
    try:
        outbox = client.outbox(dead=MOST_DEAD)
    except NotReadyError:
        yield Finding("alerts", "ok", "off (alerts.enabled)")
        return
    yield from alert_findings(outbox)


def _asked(what: str, ask: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from ask()
    except SightlineError as error:
        yield Finding(what, "wrong", str(error), "see the log of the process that is named, or use another token")


def camera_findings(cameras: Sequence[CameraStatus]) -> Iterator[Finding]:
    """Cameras without pictures, at reduced quality, losing windows, or decoded elsewhere than wished."""
    if not cameras:
        yield Finding("cameras", "warning", "there is none", "sightline cameras add NAME SOURCE")
        return
    from cluster.types.cameras import NOT_ASKED

    running = sum(camera.state == "running" for camera in cameras)
    text = f"{running} of {len(cameras)} running"
    silent = [
        Finding("cameras", level, f"{text}; {_named(said)}", remedy)
        for states, level, remedy in SILENT
        if (said := [f"{each.name}: {redact(each.reason or each.state)}" for each in cameras if each.state in states])
    ]
    yield from silent or [Finding("cameras", "ok", text)]
    # Outside the hours of all its questions a camera runs as it is meant to.
    told = [
        f"{each.name}: {redact(each.reason)}"
        for each in cameras
        if each.state == "running" and each.reason not in ("", NOT_ASKED)
    ]
    if told:
        yield Finding("running cameras", "warning", _named(told), "see States of a camera in docs/operations.md")
    shed = [camera.name for camera in cameras if camera.rung == "shed"]
    lowered = [camera.name for camera in cameras if camera.rung not in ("full", "shed")]
    if shed or lowered:
        found = "; ".join(
            f"{what}: {_named(names)}" for what, names in (("not answered", shed), ("lowered", lowered)) if names
        )
        remedy = "add replicas, lengthen window.stride_s, or mark cameras background"
        yield Finding("quality", "wrong" if shed else "warning", found, remedy)
    done = sum(camera.windows_done + camera.windows_gated for camera in cameras)
    dropped = sum(camera.windows_dropped + camera.windows_lost for camera in cameras)
    if dropped > MOST_DROPPED * (done + dropped):
        found = f"{dropped} of {done + dropped} windows were dropped or lost since the cameras began"
        yield Finding("windows", "warning", found, "see sightline_windows_total{reason} in docs/operations.md")


def replica_findings(replicas: Sequence[ReplicaStatus]) -> Iterator[Finding]:
    """None at all, engines that answer nothing, windows that wait, drained ones, and tiers that do not work."""
    if not replicas:
        yield Finding("replicas", "wrong", "none is ready", "see the replicas' logs: model, memory of the GPU")
        return
    failing = [f"{each.name}: {each.trouble}" for each in replicas if each.trouble]
    behind = [f"{each.name}: {each.backlog_s:.0f} s of windows wait" for each in replicas if each.backlog_s > BEHIND_S]
    drained = [each.name for each in replicas if each.draining]
    if failing:
        yield Finding("replicas", "wrong", _named(failing), "see that replica's log; Serve restarts one that hangs")
    if behind:
        yield Finding("replicas", "wrong", _named(behind), "add replicas, or lengthen window.stride_s")
    if drained:
        remedy = "stop them once they hold no camera, or sightline replicas drain --undo"
        yield Finding("replicas", "warning", f"drained: {_named(drained)}", remedy)
    if not (failing or behind or drained):
        fullest = max(each.utilisation for each in replicas)
        yield Finding("replicas", "ok", f"{len(replicas)} ready" + (f", the fullest {fullest:.0%}" if fullest else ""))
    if without := sorted({redact(each.memory) for each in replicas if each.memory}):
        remedy = "see SightlineTierDown in docs/operations.md; memories wait in the tier above meanwhile"
        yield Finding("memory", "wrong", _named(without), remedy)
    else:
        yield Finding("memory", "ok", "every tier works")


def alert_findings(outbox: Outbox) -> Iterator[Finding]:
    """The alerts' folder, and sinks that take nothing."""
    if outbox.trouble:
        found = f"not on disk: {redact(outbox.trouble)} ({outbox.unwritten} alerts in memory)"
        yield Finding("alerts", "wrong", found, "make room in alerts.folder, or make it writable")
    elif outbox.lost:
        yield Finding(
            "alerts", "wrong", f"{outbox.lost} alerts were lost", "see SightlineAlertsLost in docs/operations.md"
        )
    else:
        yield Finding("alerts", "ok", f"kept; {len(outbox.sinks)} sinks")
    if outbox.disk and not outbox.trouble:
        yield Finding("disk", "warning", f"{size(outbox.free_bytes)} free for incidents", f"make room: {outbox.disk}")
    # Those that are on disk now: a sink's own count goes on after they were sent again, and restarts with alerting.
    dead = Counter(letter.sink for letter in outbox.dead)
    for name, lane in outbox.sinks.items():
        if lane.trouble or dead[name]:
            found = redact(lane.trouble) or f"{dead[name]} alerts refused for good"
            yield Finding(
                f"sink {name}", "wrong", f"{lane.kind}: {found}", "correct it, then sightline incidents resend"
            )


def _named(lines: Sequence[str]) -> str:
    more = len(lines) - MOST_NAMED
    return "; ".join(islice(lines, MOST_NAMED)) + (f"; and {more} more" if more > 0 else "")
