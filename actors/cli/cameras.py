"""``sightline cameras``: add, change, list and remove cameras of a running cluster."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from actors.cli import camera_files
from actors.cli.calibrate import calibrate
from actors.cli.camera_files import Takeover
from actors.cli.options import (
    DEFAULT_GATEWAY,
    CameraPriority,
    Gateway,
    Json,
    Output,
    Questions,
    Settings,
    Yes,
    confirm_deletion,
    connect,
    of_token,
    parse_questions,
    parse_settings,
)
from actors.cli.output import cameras_table, console, expectation, for_each, print_json, reasons, reconnecting, save
from cluster.errors import ConfigError, UnavailableError, UnknownCameraError
from cluster.redaction import redact
from cluster.security.roles import EVERY, in_scope, is_pattern

app = typer.Typer(no_args_is_help=True, help="Add, change, list and remove cameras of a running cluster.")
app.command("apply")(camera_files.apply)
app.command("export")(camera_files.export)
app.command("calibrate")(calibrate)
app.command("discover")(camera_files.discover)

CONNECT_S = 8.0
"""Seconds that `add` waits for the source to connect or fail: more than source.connect_timeout_s."""

UNANSWERED = 3
"""Exit code of `add` if the camera was added but its source does not answer."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the camera.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Cameras, or patterns as in 'line-7-*'.")]


@app.command("add")
def add(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="rtsp://… or a file the cluster can read; empty for a camera that pushes."
        ),
    ] = "",
    question: Questions = None,
    priority: CameraPriority = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'X,Y X,Y X,Y'",
            help="Privacy mask, blacked out before any processing: polygon corners as fractions of picture width and "
            "height from the top left; may be repeated.",
        ),
    ] = None,
    zone: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'X,Y X,Y X,Y'",
            help="Zone outlined for the model, written like --mask; questions call them the red, yellow, blue and "
            "green zone, in this order. May be repeated.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Add it even if capacity is exceeded.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait for the source to connect.")] = False,
    settings: Settings = None,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Add a camera and start it. If its source does not answer within 8 s, prints the reason and exits with code 3: the
    camera stays, and the source is retried.

    Prints the camera's replica, window rate and expected lag, and its quality if replicas are full. A camera beyond
    capacity is refused, with the shortfall in such cameras and in replicas.

    $ sightline cameras add gate rtsp://10.0.0.11/stream1 -q "fence@0.6=Is anyone climbing the fence?"

    $ sightline cameras add gate-2 rtsp://10.0.0.12/stream1 --priority critical

    $ sightline cameras add yard rtsp://10.0.0.13/stream1 --mask "0,0 0.4,0 0.4,0.3 0,0.3"

    $ sightline cameras add depot --set window.stride_s=4   # fed by `sightline push`
    """
    from cluster.config import parse_camera

    # The cluster validates it too; checking here finds the error without a round trip.
    wanted = parse_settings(settings) | ({} if priority is None else {"priority": priority})
    for key, given in (("privacy_masks", mask), ("zones", zone)):
        if given:
            wanted[key] = [*wanted.get(key, []), *given]
    entry = parse_camera(name, source, parse_questions(question), wanted)
    asked = [item.question() for item in entry.questions or []]
    with connect(gateway) as client:
        status = client.camera_add(name, entry.source, asked, wanted, force=force)
        deadline, waits = time.monotonic() + CONNECT_S, bool(entry.source) and not no_wait
        try:
            while waits and status.state in ("waiting", "connecting") and time.monotonic() < deadline:
                time.sleep(CONNECT_S / 40)
                status = client.camera_get(name)
        except UnavailableError:
            # The camera is added even if the gateway has become unreachable since.
            waits = False
    if print_json(json, status):
        print(f"{name}: {status.state}" + (f", {status.reason}" if status.reason else ""))
        print(expectation(status))
    if waits and status.state in ("connecting", "backoff", "error"):
        print(f"{name} was added, but does not answer: {redact(status.reason) or 'no video yet'}", file=sys.stderr)
        raise typer.Exit(UNANSWERED)


@app.command("update")
def update(
    name: Name,
    source: Annotated[str | None, typer.Option(metavar="SOURCE", help="New source; the camera reconnects.")] = None,
    question: Questions = None,
    priority: CameraPriority = None,
    takeover: Takeover = False,
    settings: Settings = None,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Change a running camera; what is not given stays as it is.

    Changes of questions, priority, window or memory keep the camera's window and memory. A new source, sampling,
    pruning, privacy masks or zones restart its window and keep its memory.

    $ sightline cameras update gate -q "fence@0.7=Is anyone climbing the fence?"

    $ sightline cameras update gate --priority critical --set window.stride_s=4
    """
    from cluster.config import deep_merge, parse_camera
    from cluster.control.cameras.managed import settings_of

    wanted = parse_settings(settings) | ({} if priority is None else {"priority": priority})
    if question:
        wanted["questions"] = parse_questions(question)
    if not wanted and source is None:
        raise ConfigError("nothing to change; give --source, --question, --priority or --set")
    with connect(gateway) as client:
        [camera] = client.cameras_export([name], secrets=True)
        before = settings_of(camera.entry)
        address = camera.entry.source if source is None else source
        # The cluster validates it too; checking here finds the error without a round trip.
        entry = parse_camera(name, address, settings=deep_merge(before, wanted))
        status = client.camera_update(
            name, entry.source, settings_of(entry), takeover=takeover, revision=camera.revision
        )
    if print_json(json, status):
        print(f"{name}: changed")
        # For a camera that sends nothing the scheduler's estimate is close to zero.
        if status.state == "running":
            print(expectation(status))


@app.command("pause")
def pause(names: Names, takeover: Takeover = False, gateway: Gateway = DEFAULT_GATEWAY) -> None:
    """Stop cameras but keep their memory: they are neither connected, decoded nor asked until `cameras resume`.

    A camera managed by `cameras apply` stays so: the next `apply` without `paused: true` in its file resumes it.

    $ sightline cameras pause gate 'line-7-*'
    """
    _set_paused(names, True, takeover, gateway)


@app.command("resume")
def resume(names: Names, takeover: Takeover = False, gateway: Gateway = DEFAULT_GATEWAY) -> None:
    """Start paused cameras again.

    $ sightline cameras resume gate
    """
    _set_paused(names, False, takeover, gateway)


def _set_paused(names: list[str], paused: bool, takeover: bool, gateway: str) -> None:
    from cluster.control.cameras.managed import CONFIGURATION, KUBERNETES, ManagedCamera, settings_of

    def set_paused(camera: ManagedCamera) -> None:
        name = camera.entry.name
        # Files omit `paused` unless it is true: a resumed camera then equals its file again.
        settings = {key: value for key, value in settings_of(camera.entry).items() if key != "paused"}
        settings |= {"paused": True} if paused else {}
        manager = "" if takeover or camera.manager in (CONFIGURATION, KUBERNETES) else camera.manager
        # The source as exported, redacted: the cluster fills in its secrets.
        source, revision = str(camera.entry.source), camera.revision
        client.camera_update(name, source, settings, manager=manager, takeover=takeover, revision=revision)
        print(f"{name}: {'paused' if paused else 'resumed'}")

    with connect(gateway) as client:
        exported = client.cameras_export(() if any(map(is_pattern, names)) else names)
        cameras = [each for each in exported if in_scope(each.entry.name, names)]
        if missing := [name for name in names if not any(in_scope(each.entry.name, [name]) for each in cameras)]:
            raise UnknownCameraError(f"no camera matches {', '.join(missing)}")
        for_each(cameras, set_paused)


@app.command("test")
def try_source(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Address, or a file the cluster can read.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="Camera that has or would get the source.")] = "test",
    output: Output = None,
    settings: Settings = None,
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Open a source for a few seconds as a camera would and report what it sends, without adding a camera; --output
    saves a picture as the model would see it.

    $ sightline cameras test rtsp://10.0.0.11/stream1 -o gate.jpg
    """
    with connect(gateway) as client:
        found = client.test_source(name, source, parse_settings(settings))
    gop = f"a keyframe every {found.gop_pictures} ({found.gop_s:.1f} s)" if found.gop_pictures else "one keyframe"
    print(f"{found.codec} {found.width}x{found.height}, {found.fps:.1f} pictures/s, {found.kbit_s:.0f} kbit/s, {gop}")
    print(f"cue {found.cue}, keeps {found.kept:.0%} of the picture; decoded on {found.decode}")
    print(f"first picture after {found.first_picture_s:.1f} s")
    if output is not None:
        save(output, [found.jpeg], len(found.jpeg), str(output))


@app.command("list")
def list_cameras(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Cameras or patterns; default all.")
    ] = None,
    states: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Only in this state; may be repeated.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh a screenful until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates with --watch.")] = 1.0,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """List cameras: state and reason, picture and cue, windows, tokens, latency, last answers.

    $ sightline cameras list 'line-7-*' --state error --state backoff

    $ sightline cameras list --watch

    $ sightline cameras list --json - | jq '.[] | select(.state == "error") | .name'
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from cluster.types import CameraStatus

    with connect(gateway) as client:

        def listed() -> list[CameraStatus]:
            chosen = (each for each in client.cameras_list() if in_scope(each.name, names or EVERY))
            return [each for each in chosen if not states or each.state in states]

        if json is not None and not print_json(json, listed()):
            return
        screen = console()

        def table() -> Group:
            cameras = listed()
            if not cameras:
                such = " such" if names or states else ""
                return Group(f"no{such} cameras{of_token()}; add one with `sightline cameras add`")
            # Rendering thousands of rows takes seconds, and a terminal shows the first screenful.
            shown = cameras[: screen.height] if watch else cameras
            return Group(cameras_table(shown, screen.width), *map(Text, reasons(shown)))

        def tables() -> Iterator[Group]:
            while True:
                yield table()
                time.sleep(interval)

        if not watch:
            screen.print(table())
            return
        with Live("", console=screen, auto_refresh=False) as live:
            for each in reconnecting(client, tables):
                live.update(each, refresh=True)


@app.command("picture")
def picture(
    name: Name,
    output: Output = None,
    kept: Annotated[bool, typer.Option("--kept", help="Darken the patches that the model does not see.")] = False,
    width: Annotated[int, typer.Option(min=0, help="Width in pixels; 0: the model's input size.")] = 0,
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Save a camera's newest picture (NAME.jpg) as the model sees it: with privacy masks, at its input size.

    $ sightline cameras picture gate -o gate.jpg --kept
    """
    with connect(gateway) as client:
        found = client.picture(name, kept=kept, width=width)
    file = output or Path(f"{name}.jpg")
    save(file, [found.jpeg], len(found.jpeg), name)
    print(f"{file}: {found.width}x{found.height}, {found.age_s:.1f} s old")


@app.command("remove")
def remove(name: Name, yes: Yes = False, takeover: Takeover = False, gateway: Gateway = DEFAULT_GATEWAY) -> None:
    """Remove a camera and delete its memory, incidents and clips; `cameras pause` keeps them.

    $ sightline cameras remove gate
    """
    if not yes:
        confirm_deletion(name, "keep it with `cameras pause`")
    with connect(gateway) as client:
        client.camera_remove(name, takeover=takeover)
    print(f"{name}: removed")
