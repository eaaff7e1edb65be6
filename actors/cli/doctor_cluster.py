"""``sightline doctor --gateway``: problems of a running cluster as its gateway reports them, with remedies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from actors.cli.output import plural, size
from cluster.errors import NotReadyError, SightlineError, at_most
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
STATES = "see States of a camera in docs/operations.md"
LOWERED = "add replicas, lengthen window.stride_s, or mark cameras background"
LOST = "see sightline_windows_total{reason} in docs/operations.md"
ALERTS_LOST = "see SightlineAlertsLost in docs/operations.md"
RESEND = "correct it, then sightline incidents resend"
DRAINED = "stop them once they hold no camera, or sightline replicas drain --undo"
SILENT = (
    (("backoff", "error"), "wrong", "correct the source: sightline cameras test SOURCE"),
    (("waiting", "connecting"), "warning", STATES),
)


class Finding(NamedTuple):
    """``state``: ok, warning or wrong; ``remedy``: empty with ok."""

    what: str
    state: str
    found: str
    remedy: str = ""

    @classmethod
    def from_message(cls, what: str, state: str, message: object, remedy: str = "") -> Finding:
        """From a message ``problem; fix``; ``remedy``: for one without a fix."""
        found, _, fix = str(message).partition("; ")
        return cls(what, state, found, fix or remedy)


def cluster_findings(client: GatewayClient) -> Iterator[Finding]:
    """Findings of every check, in order; a check that the gateway does not answer is ``wrong``, with the reason."""
    try:
        cameras = client.cameras_list()
    except SightlineError as error:
        yield Finding.from_message("gateway", "wrong", error, "start it, or name its address")
        return
    yield Finding("gateway", "ok", f"answers at {client.address}")
    yield from camera_findings(cameras)
    yield from _asked("replicas", lambda: replica_findings(client.replicas_and_decoders()[0]))
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
        yield Finding(what, "wrong", str(error), "see the log of the named process, or use another token")


def camera_findings(cameras: Sequence[CameraStatus]) -> Iterator[Finding]:
    """Cameras without pictures, at reduced quality, losing windows, or decoded on another device than configured."""
    if not cameras:
        yield Finding("cameras", "warning", "none", "sightline cameras add NAME SOURCE")
        return
    from cluster.types.cameras import NOT_ASKED

    text = f"{sum(camera.state == 'running' for camera in cameras)} of {len(cameras)} running"
    silent = [
        Finding("cameras", level, f"{text}; {_named(said)}", remedy)
        for states, level, remedy in SILENT
        if (said := [f"{each.name}: {redact(each.reason or each.state)}" for each in cameras if each.state in states])
    ]
    yield from silent or [Finding("cameras", "ok", text)]
    # A camera outside the hours of all its questions runs as intended.
    running = [each for each in cameras if each.state == "running" and each.reason not in ("", NOT_ASKED)]
    shed = [each.name for each in cameras if each.rung == "shed"]
    lowered = [each.name for each in cameras if each.rung not in ("full", "shed")]
    quality = [f"{what}: {_named(names)}" for what, names in (("not answered", shed), ("lowered", lowered)) if names]
    done = sum(each.windows_done + each.windows_gated for each in cameras)
    dropped = sum(each.windows_dropped + each.windows_lost for each in cameras)
    lost = f"{dropped} of {done + dropped} windows were dropped or lost since the cameras started"
    yield from _any(
        ("running cameras", "warning", [f"{each.name}: {redact(each.reason)}" for each in running], STATES),
        ("quality", "wrong" if shed else "warning", quality, LOWERED),
        ("windows", "warning", [lost] if dropped > MOST_DROPPED * (done + dropped) else [], LOST),
    )


def replica_findings(replicas: Sequence[ReplicaStatus]) -> Iterator[Finding]:
    """Missing, failing, overloaded and drained replicas, and failing memory tiers."""
    if not replicas:
        yield Finding("replicas", "wrong", "none is ready", "see the replicas' logs: model, GPU memory")
        return
    failing = [f"{each.name}: {each.trouble}" for each in replicas if each.trouble]
    behind = [f"{each.name}: backlog of {each.backlog_s:.0f} s" for each in replicas if each.backlog_s > BEHIND_S]
    drained = [each.name for each in replicas if each.draining]
    fullest = max(each.utilisation for each in replicas)
    without = sorted({redact(each.memory) for each in replicas if each.memory})
    remedy = "see SightlineTierDown in docs/operations.md; until then memories wait in the tier above"
    yield from _any(
        ("replicas", "wrong", failing, "see that replica's log; Serve restarts one that hangs"),
        ("replicas", "wrong", behind, "add replicas, or lengthen window.stride_s"),
        ("replicas", "warning", [f"drained: {_named(drained)}"] if drained else [], DRAINED),
    ) or [Finding("replicas", "ok", f"{len(replicas)} ready" + (f", the fullest {fullest:.0%}" if fullest else ""))]
    yield from _any(("memory", "wrong", without, remedy)) or [Finding("memory", "ok", "every tier works")]


def alert_findings(outbox: Outbox) -> Iterator[Finding]:
    """The alerts' folder, and failing sinks."""
    if outbox.trouble:
        found = f"not on disk: {redact(outbox.trouble)} ({outbox.unwritten} alerts in memory)"
        yield Finding("alerts", "wrong", found, "free some space in alerts.folder, or make it writable")
    elif outbox.lost:
        yield Finding("alerts", "wrong", f"{outbox.lost} alerts were lost", ALERTS_LOST)
    else:
        yield Finding("alerts", "ok", f"kept; {plural(len(outbox.sinks), 'sink')}")
    if outbox.disk and not outbox.trouble:
        yield Finding("disk", "warning", f"{size(outbox.free_bytes)} free for incidents", f"free space: {outbox.disk}")
    # Dead letters now on disk: a sink's own counter does not shrink when they are resent, and restarts with alerting.
    dead = Counter(letter.sink for letter in outbox.dead)
    for name, lane in outbox.sinks.items():
        if lane.trouble or dead[name]:
            found = redact(lane.trouble) or f"{dead[name]} alerts permanently refused"
            yield Finding(f"sink {name}", "wrong", f"{lane.kind}: {found}", RESEND)


def _any(*rows: tuple[str, str, Sequence[str], str]) -> list[Finding]:
    """A finding for each row that has lines."""
    return [Finding(what, state, _named(lines), remedy) for what, state, lines, remedy in rows if lines]


def _named(lines: Sequence[str]) -> str:
    return "; ".join(at_most(MOST_NAMED, lines))
