"""``sightline cameras``: add, list and remove cameras of a running cluster."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from actors.cli.options import DEFAULT_GATEWAY, Gateway, Json, Settings, client_credentials

app = typer.Typer(no_args_is_help=True, help="Add, list and remove cameras of a running cluster.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the camera.")]


@app.command("add")
def add(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="rtsp://… or a file the cluster can read; nothing for a camera that pushes."
        ),
    ] = "",
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            "-q",
            metavar="[ID[@THRESHOLD]=]TEXT",
            help="A standing yes/no question; may be repeated. Without one the cluster's own questions are asked.",
        ),
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="critical: never late while anything else can give way; normal; background: the first to be shed.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Add it although there is no room for it.")] = False,
    settings: Settings = None,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Add a camera; it starts at once.

    Says who answers it, how often and how soon; at which quality, where the replicas are full; or refuses it and says
    what is missing, in cameras like it and in replicas.

    $ sightline cameras add gate rtsp://10.0.0.11/stream1 -q "fence@0.6=Is anyone climbing the fence?"

    $ sightline cameras add gate-2 rtsp://10.0.0.12/stream1 --priority critical

    $ sightline cameras add depot --set window.stride_s=4     (fed by `sightline push`)
    """
    from dataclasses import asdict

    from actors.cli.options import parse_questions, parse_settings
    from actors.cli.output import write_json
    from actors.cli.tables import expectation
    from cluster.config import parse_camera
    from cluster.rpc.client import GatewayClient

    # The same check as the cluster makes, here because it can name what is wrong without a round trip.
    wanted = parse_settings(settings) | ({} if priority is None else {"priority": priority})
    entry = parse_camera(name, source, parse_questions(question), wanted)
    asked = [item.question() for item in entry.questions or []]
    with GatewayClient(gateway, credentials=client_credentials()) as client:
        status = client.camera_add(name, source, asked, wanted, force=force)
    if json is not None:
        write_json(json, asdict(status))
    if json != "-":
        print(f"{name}: {status.state}" + (f", {status.reason}" if status.reason else ""))
        print(expectation(status))


@app.command("list")
def list_cameras(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the table up to date until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks with --watch.")] = 1.0,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Show every camera: state and reason, picture and cue, windows, tokens, latency, last answers.

    $ sightline cameras list --watch

    $ sightline cameras list --json - | jq '.[] | select(.state == "error") | .name'
    """
    from dataclasses import asdict

    from rich.console import Group

    from actors.cli.output import console, write_json
    from actors.cli.tables import cameras_table, reasons
    from cluster.rpc.client import GatewayClient

    with GatewayClient(gateway, credentials=client_credentials()) as client:
        if json is not None:
            statuses = [asdict(status) for status in client.cameras_list()]
            write_json(json, statuses)
            if json == "-":
                return
        screen = console()

        def picture() -> Group:
            cameras = client.cameras_list()
            if not cameras:
                return Group("no cameras; add one with `sightline cameras add`")
            return Group(cameras_table(cameras, screen.width), *reasons(cameras))

        if not watch:
            screen.print(picture(), markup=False)
            return
        from rich.live import Live

        with Live(picture(), console=screen, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(picture(), refresh=True)


@app.command("remove")
def remove(name: Name, gateway: Gateway = DEFAULT_GATEWAY) -> None:
    """Remove a camera and forget what was seen of it.

    $ sightline cameras remove gate
    """
    from cluster.rpc.client import GatewayClient

    with GatewayClient(gateway, credentials=client_credentials()) as client:
        client.camera_remove(name)
    print(f"{name}: removed")
