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
from actors.cli.output import cameras_table, console, expectation, print_json, reasons, reconnecting, save
from cluster.errors import ConfigError, UnavailableError
from cluster.redaction import redact

app = typer.Typer(no_args_is_help=True, help="Add, change, list and remove cameras of a running cluster.")
app.command("apply")(camera_files.apply)
app.command("export")(camera_files.export)
app.command("calibrate")(calibrate)
app.command("discover")(camera_files.discover)

CONNECT_S = 8.0
"""Seconds that `add` waits for what becomes of the source: more than source.connect_timeout_s."""

UNANSWERED = 3
"""Exit code of `add` for a camera that is added and does not answer."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the camera.")]


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
            help="Privacy mask: corners as shares of the picture's width and height, 0..1 from the "
            "top left; may be repeated. Blacked out before any processing.",
        ),
    ] = None,
    zone: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'X,Y X,Y X,Y'",
            help="Part of the picture that is outlined for the model; questions name the first the red zone, then "
            "yellow, blue, green. Written as --mask; may be repeated.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Add it even if capacity is exceeded.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait for what becomes of its source.")] = False,
    settings: Settings = None,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Add a camera; it starts at once. Where its source does not answer within 8 s, says why and ends with exit code 3:
    it is added, and tried again.

    Says who answers it, how often and how soon; at which quality, where the replicas are full; or refuses it and says
    what is missing, in cameras like it and in replicas.

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
            # It is added, also where the gateway is gone a moment later.
            waits = False
    if print_json(json, status):
        print(f"{name}: {status.state}" + (f", {status.reason}" if status.reason else ""))
        print(expectation(status))
    if waits and status.state in ("connecting", "backoff", "error"):
        print(f"{name} is added but does not answer: {redact(status.reason) or status.state}", file=sys.stderr)
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
    """Change a camera while it runs; what is not given stays as it is.

    Questions, priority, window and memory change with the camera's window and memory kept. Another source, sampling,
    pruning, other privacy masks or zones begin its window anew; what it remembers stays.

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
        # What the scheduler counts with of one that sends nothing is next to nothing.
        if status.state == "running":
            print(expectation(status))


@app.command("pause")
def pause(name: Name, takeover: Takeover = False, gateway: Gateway = DEFAULT_GATEWAY) -> None:
    """Stop a camera without forgetting it: neither connected nor decoded nor asked until `cameras resume`.

    One that came from files with `cameras apply` stays theirs: the next `apply` of files without `paused: true` resumes
    it.

    $ sightline cameras pause gate
    """
    _set_paused(name, True, takeover, gateway)


@app.command("resume")
def resume(name: Name, takeover: Takeover = False, gateway: Gateway = DEFAULT_GATEWAY) -> None:
    """Start a paused camera again.

    $ sightline cameras resume gate
    """
    _set_paused(name, False, takeover, gateway)


def _set_paused(name: str, paused: bool, takeover: bool, gateway: str) -> None:
    from cluster.control.cameras.managed import CONFIGURATION, KUBERNETES, settings_of

    with connect(gateway) as client:
        [camera] = client.cameras_export([name])
        # As files have it: one that is not paused is the same for them as before.
        settings = {key: value for key, value in settings_of(camera.entry).items() if key != "paused"}
        manager = "" if takeover or camera.manager in (CONFIGURATION, KUBERNETES) else camera.manager
        # The source as it is shown: the cluster keeps its secrets.
        client.camera_update(
            name,
            str(camera.entry.source),
            settings | ({"paused": True} if paused else {}),
            manager=manager,
            takeover=takeover,
            revision=camera.revision,
        )
    print(f"{name}: {'paused' if paused else 'resumed'}")


@app.command("test")
def try_source(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Address, or a file the cluster can read.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="The camera that has it or would get it.")] = "test",
    output: Output = None,
    settings: Settings = None,
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Open a source for some seconds as a camera would and say what it sends, without adding a camera; with --output
    save a picture, as the model would see it.

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
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the table up to date until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates with --watch.")] = 1.0,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Show every camera: state and reason, picture and cue, windows, tokens, latency, last answers.

    $ sightline cameras list --watch

    $ sightline cameras list --json - | jq '.[] | select(.state == "error") | .name'
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with connect(gateway) as client:
        if json is not None and not print_json(json, client.cameras_list()):
            return
        screen = console()

        def picture() -> Group:
            cameras = client.cameras_list()
            if not cameras:
                return Group(f"no cameras{of_token()}; add one with `sightline cameras add`")
            return Group(cameras_table(cameras, screen.width), *map(Text, reasons(cameras)))

        def pictures() -> Iterator[Group]:
            while True:
                yield picture()
                time.sleep(interval)

        if not watch:
            screen.print(picture())
            return
        with Live("", console=screen, auto_refresh=False) as live:
            for each in reconnecting(client, pictures):
                live.update(each, refresh=True)


@app.command("picture")
def picture(
    name: Name,
    output: Output = None,
    kept: Annotated[bool, typer.Option("--kept", help="Darken the patches that the model does not see.")] = False,
    width: Annotated[int, typer.Option(min=0, help="Pixels; 0 is the model's input size.")] = 0,
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Save a camera's newest picture (NAME.jpg), as the model sees it: after privacy masks, in its size.

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
