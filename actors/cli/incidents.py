"""``sightline incidents``: list, review and mute incidents, get clips, inspect the outbox; ``sightline alerts``."""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actors.cli.options import DEFAULT_GATEWAY, Gateway, Json, JsonStream, connect, of_token, parse_duration, spoken
from actors.cli.output import (
    JsonLines,
    console,
    for_each,
    make_table,
    plural,
    print_json,
    reconnecting,
    save,
    warn_of_missed,
    works_or,
)
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from cluster.alerts.dispatcher import Outbox
    from cluster.alerts.incident import AlertEvent, Incident, Mute, Verdict

app = typer.Typer(no_args_is_help=True, help="List, acknowledge and mute incidents.")
alerts = typer.Typer(no_args_is_help=True, help="Test alert sinks.")

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the incident, as shown by `incidents list`.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of incidents, as shown by `incidents list`.")]
Camera = Annotated[str, typer.Option("--camera", metavar="NAME", help="Only this camera.")]
Subject = Annotated[str, typer.Option("--question", metavar="ID", help="Only this question, or camera state.")]
By = Annotated[str, typer.Option("--by", metavar="NAME", help="Your name. Default: your login.")]

STYLE = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


@app.command("list")
def list_incidents(
    camera: Camera = "",
    question: Subject = "",
    only_open: Annotated[bool, typer.Option("--open", help="Only open incidents.")] = False,
    since: Annotated[str, typer.Option(metavar="DURATION", help="Only from the last 90s, 10m, 2h, 1d.")] = "",
    verdict: Annotated[str, typer.Option(metavar="VERDICT", help="Only confirmed, rejected or unreviewed.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum to show.")] = 50,
    before: Annotated[str, typer.Option(metavar="ID", help="Continue after this incident: the next page.")] = "",
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """List incidents, newest first.

    $ sightline incidents list --open

    $ sightline incidents list --camera gate --since 2h --json - | jq '.[].id'
    """
    # An age, not a time: this machine's clock may differ from the cluster's.
    within_s = parse_duration(since, "--since") if since else 0.0
    with connect(gateway) as client:
        found = client.incidents(
            camera=camera,
            subject=question,
            only_open=only_open,
            within_s=within_s,
            before=before,
            verdict=verdict,
            limit=limit,
        )
        if camera and not found and not before:
            # An unknown camera is an error, not an empty list.
            client.camera_get(camera)
    if print_json(json, found):
        console().print(_incidents_table(found) if found else f"no incidents{of_token()}", markup=False)
    if len(found) == limit:
        # On standard error: whoever pipes the list must learn of it too.
        print(f"the newest {limit}; there may be more: --before {found[-1].id}", file=sys.stderr)


@app.command("show")
def show(incident: Id, gateway: Gateway = DEFAULT_GATEWAY, json: Json = None) -> None:
    """Show one incident with its events and deliveries.

    $ sightline incidents show 3f9c2a51d07be864
    """
    with connect(gateway) as client:
        detail = client.incident(incident)
    if not print_json(json, detail):
        return
    screen = console()
    screen.print("\n".join(summary(detail.incident)), markup=False)
    rows = []
    for event in detail.events:
        sent = [_delivery_text(each) for each in detail.deliveries if each.event.key == event.key]
        rows.append((event.kind, _clock(event.at_s), "muted" if event.silent else ", ".join(sent)))
    screen.print(make_table("!event|!at|sent to", rows))


@app.command("ack")
def acknowledge(incidents: Ids, by: By = "", gateway: Gateway = DEFAULT_GATEWAY) -> None:
    """Acknowledge incidents; the sinks are notified once of each.

    $ sightline incidents ack 3f9c2a51d07be864

    $ sightline incidents list --open -n 1000 --json - | jq -r '.[].id' | xargs sightline incidents ack
    """
    with connect(gateway) as client:

        def acknowledge_one(incident: str) -> None:
            found = client.acknowledge(incident, by or _login())
            print(f"{found.id}: acknowledged by {found.acknowledged_by}")

        for_each(incidents, acknowledge_one)


@app.command("confirm")
def confirm(incident: Id, by: By = "", gateway: Gateway = DEFAULT_GATEWAY) -> None:
    """Mark an incident as a true alarm, for `cameras calibrate`.

    $ sightline incidents confirm 3f9c2a51d07be864
    """
    _review(incident, "confirmed", by, gateway)


@app.command("reject")
def reject(
    incident: Id,
    by: By = "",
    undo: Annotated[bool, typer.Option("--undo", help="Withdraw the verdict instead.")] = False,
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Mark an incident as a false alarm, for `cameras calibrate`.

    $ sightline incidents reject 3f9c2a51d07be864
    """
    _review(incident, "" if undo else "rejected", by, gateway)


def _review(incident: str, verdict: Verdict, by: str, gateway: str) -> None:
    with connect(gateway) as client:
        found = client.review(incident, verdict, by or _login())
    print(f"{found.id}: {f'{found.verdict} by {found.reviewed_by}' if found.verdict else 'not reviewed'}")


@app.command("clip")
def clip(
    incident: Id,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Output file; default ID.mp4 or ID.jpg.")
    ] = None,
    snapshot: Annotated[bool, typer.Option("--snapshot", help="Save the snapshot instead of the clip.")] = False,
    at_end: Annotated[bool, typer.Option("--end", help="Save the clip of its end; needs clips.at_end.")] = False,
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Save the clip of an incident, from before it began to after the alert.

    $ sightline incidents clip 3f9c2a51d07be864 -o fence.mp4

    $ sightline incidents clip 3f9c2a51d07be864 --snapshot
    """
    if snapshot and at_end:
        raise ConfigError("--snapshot and --end contradict each other; give one of them")
    kind: Literal["snapshot", "clip", "end"] = "snapshot" if snapshot else "end" if at_end else "clip"
    file = output or Path(f"{incident}.{'jpg' if snapshot else 'mp4'}")
    with connect(gateway) as client:
        about, data = client.footage(incident, kind)
        size = save(file, data, about.size, f"{kind} of {about.camera}")
    print(f"{file}: {kind} of an incident at {about.camera}, {size} bytes")
    if about.note and not snapshot:
        console(stderr=True).print(about.note, style="yellow", markup=False)


@app.command("mute")
def mute(
    camera: Camera = "",
    question: Subject = "",
    length: Annotated[str, typer.Option("--for", metavar="DURATION", help="How long: 30m, 8h, 7d.")] = "",
    lift: Annotated[bool, typer.Option("--lift", help="Remove the mute of this camera and question.")] = False,
    by: By = "",
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Mute a camera, a question, or a question at one camera for a while; incidents are still recorded. Without --for
    or --lift, lists the active mutes.

    $ sightline incidents mute --camera gate --for 2h

    $ sightline incidents mute --camera gate --lift
    """
    if lift and length:
        raise ConfigError("--for and --lift contradict each other; give one of them")
    for_s = parse_duration(length, "--for") if length else 0.0
    with connect(gateway) as client:
        if lift:
            mutes = client.unmute(camera, question)
        elif length:
            if camera:
                client.camera_get(camera)
            mutes = client.mute(camera, question, for_s, by or _login())
        else:
            mutes = client.mutes()
    if print_json(json, mutes):
        print("\n".join(_mute_line(each) for each in mutes) or "nothing is muted")


@app.command("follow")
def follow(
    cameras: Annotated[list[str] | None, typer.Argument(metavar="CAMERA", help="Only these cameras.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after this many events; 0: never.")] = 0,
    only_new: Annotated[bool, typer.Option("--only-new", help="Skip incidents that are already open.")] = False,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: JsonStream = None,
) -> None:
    """Print incident events as they happen, until Ctrl-C. Incidents already open come first, again after each
    reconnection to the gateway.

    $ sightline incidents follow gate

    $ sightline incidents follow --json - | jq .incident.subject
    """
    screen = console()
    with JsonLines(json) as lines, connect(gateway) as client:
        for camera in cameras or ():
            client.camera_get(camera)
        stream = reconnecting(client, lambda: client.follow(cameras or (), opened=not only_new))
        for shown, (event, missed) in enumerate(stream, start=1):
            warn_of_missed(missed, "events")
            lines.write({**event.body(), "cause": event.cause, "missed": missed})
            if json != "-":
                screen.print(event_line(event))
            if shown == count:
                return


@app.command("outbox")
def outbox(
    dead: Annotated[int, typer.Option(min=0, max=1000, help="Maximum dead letters to show.")] = 20,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Show each sink's queued, delivered and dead alerts.

    $ sightline incidents outbox
    """
    with connect(gateway) as client:
        status = client.outbox(dead)
    if print_json(json, status):
        screen = console()
        screen.print(
            _sinks_table(status) if status.sinks else "no sinks; see alerts.sinks in docs/alerts.md", markup=False
        )
        for text in troubles(status):
            screen.print(text, markup=False)


@app.command("resend")
def resend(
    sink: Annotated[str, typer.Option(metavar="NAME", help="Only dead letters of this sink.")] = "",
    key: Annotated[str, typer.Option(metavar="KEY", help="Only this alert.")] = "",
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Retry dead letters once the sink has been fixed.

    $ sightline incidents resend --sink ops
    """
    with connect(gateway) as client:
        count = client.resend(sink, key)
    print(f"{plural(count, 'alert')} sent again")


@alerts.callback()
def _alerts() -> None:
    """Test alert sinks."""


@alerts.command("test")
def try_sink(
    sink: Annotated[str, typer.Argument(metavar="SINK", help="Name of the sink in alerts.sinks.")],
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Send a test incident to one sink, and report whether it was accepted.

    $ sightline alerts test telegram
    """
    with connect(gateway) as client:
        client.test_sink(sink)
    console().print(f"{sink} accepted the test", markup=False)


def _incidents_table(incidents: Sequence[Incident]) -> Table:
    from rich.text import Text

    rows = [
        (
            each.id,
            each.camera,
            each.subject,
            Text(each.severity, STYLE.get(each.severity, "")),
            _clock(each.opened_s),
            spoken(max(0.0, (each.ended_s or time.time()) - each.opened_s)),
            f"{each.score:.2f}" if each.kind == "question" else "",
            state(each),
        )
        for each in incidents
    ]
    return make_table("!id|camera|what|severity|!since|>lasted|>score|state", rows)


def state(incident: Incident) -> Text:
    """``open``, ``open, acknowledged by ann``, ``ended``, followed by verdict and ``muted``."""
    from rich.text import Text

    parts = ["open" if incident.open else "ended"]
    if incident.acknowledged_by and incident.open:
        parts.append(f"acknowledged by {incident.acknowledged_by}")
    if incident.verdict:
        parts.append(incident.verdict)
    if incident.muted:
        parts.append("muted")
    return Text(", ".join(parts), "bold" if incident.open else "dim")


def summary(incident: Incident) -> list[str]:
    """An incident in a few lines."""
    ended = f", ended {_clock(incident.ended_s)}" if incident.ended_s is not None else ", open"
    lines = [
        f"{incident.id}: {incident.subject} at {incident.camera}, {incident.severity}",
        f"opened {_clock(incident.opened_s)}{ended}{f' ({incident.reason})' if incident.reason else ''}",
        f"video {incident.start / 1e6:.1f}–{incident.end / 1e6:.1f} s of the camera's clock",
    ]
    if incident.kind == "question":
        lines.append(f"highest score {incident.score:.2f}, {incident.windows} windows")
    if told := " ".join(filter(None, (incident.question, incident.text))):
        lines.append(told)
    if incident.clip == "waiting":
        lines.append("clip in progress")
    elif incident.clip in ("whole", "part"):
        lines.append(f"clip: sightline incidents clip {incident.id}")
    if incident.footage_note:
        lines.append(incident.footage_note)
    if incident.acknowledged_s is not None:
        lines.append(f"acknowledged by {incident.acknowledged_by}, {_clock(incident.acknowledged_s)}")
    if incident.verdict and incident.reviewed_s is not None:
        lines.append(f"{incident.verdict} by {incident.reviewed_by}, {_clock(incident.reviewed_s)}")
    return lines


def _mute_line(mute: Mute) -> str:
    by = f", by {mute.by}" if mute.by else ""
    return f"camera {mute.camera}, question {mute.subject}: muted until {_clock(mute.until_s)}{by}"


def event_line(event: AlertEvent) -> str:
    """One event as a line with colours."""
    from rich.markup import escape

    incident = event.incident
    style = STYLE.get(incident.severity, "")
    note = _event_note(event)
    score = f"  {incident.score:.2f}" if incident.kind == "question" else ""
    return (
        f"{_clock(event.at_s)}  [{style}]{event.kind:6}[/] {escape(incident.camera):16} {escape(incident.subject):14}"
        f"{score}  {incident.id}{'  muted' if event.silent else ''}{f'  {escape(note)}' if note else ''}"
    )


def _event_note(event: AlertEvent) -> str:
    """What this event changes, in words."""
    incident = event.incident
    if event.cause == "acknowledged":
        return f"acknowledged by {incident.acknowledged_by}"
    if event.cause == "review":
        return f"{incident.verdict} by {incident.reviewed_by}" if incident.verdict else "review withdrawn"
    if event.cause == "clip":
        return incident.footage_note or "clip ready"
    return incident.reason if event.kind == "end" else incident.text


def _sinks_table(status: Outbox) -> Table:
    rows = [
        (name, lane.kind, *map(str, (lane.waiting, lane.delivered, lane.failures, lane.dead)), works_or(lane.trouble))
        for name, lane in status.sinks.items()
    ]
    return make_table("sink|kind|>queued|>delivered|>failed|>dead|state", rows)


def troubles(status: Outbox) -> list[str]:
    """Problems of the outbox itself, and each dead letter."""
    lines = []
    if status.trouble:
        lines.append(f"not on disk: {status.trouble} ({status.unwritten} alerts in memory)")
    if status.lost:
        lines.append(f"{status.lost} alerts were lost")
    if status.trimmed:
        lines.append(f"{status.trimmed} delivered alerts were deleted early, see alerts.max_events and max_bytes")
    if status.answers_missed:
        lines.append(f"{status.answers_missed} answers never reached alerting, or too late")
    for letter in status.dead:
        incident = letter.event.incident
        what = f"{letter.event.kind} of {incident.subject} at {incident.camera}"
        lines.append(f"dead: {letter.event.key} ({what}) for {letter.sink}: {letter.error}")
    if status.dead:
        lines.append("retry dead alerts with: sightline incidents resend")
    return lines


def _delivery_text(delivery: Any) -> str:
    if delivery.state == "delivered":
        return str(delivery.sink)
    return f"{delivery.sink} {delivery.state}{f' ({delivery.error})' if delivery.error else ''}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "somebody"
