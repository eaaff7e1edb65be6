"""``sightline push``: an edge agent that sends a file's or an RTSP camera's packets to a cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.options import DEFAULT_GATEWAY, Gateway, Json, client_credentials
from actors.cli.output import Progress, print_json
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.wire.push import PushStatus


def push(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A video file, or rtsp://… (or HTTP, RTMP, v4l2:///dev/video0) of a camera near this machine.",
        ),
    ],
    camera: Annotated[str, typer.Option("--camera", metavar="NAME", help="Name of the camera in the cluster.")],
    loop: Annotated[bool, typer.Option("--loop", help="Files: restart at the end.")] = False,
    realtime: Annotated[
        bool, typer.Option("--realtime", help="Files: send at recording speed, as a camera would.")
    ] = False,
    speed: Annotated[float, typer.Option(min=0.01, help="Files with --realtime: playback speed.")] = 1.0,
    give_up: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Fail after this time without a connection.")
    ] = None,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Send the encoded packets of a file or camera to a cluster. Decodes nothing; reconnects and resumes.

    The cluster must have the camera, added without a source (`sightline cameras add NAME`).

    $ sightline push recording.mp4 --gateway 10.0.0.5:50051 --camera depot --realtime --loop

    $ sightline push rtsp://192.168.1.20/stream1 --gateway 10.0.0.5:50051 --camera depot
    """
    import asyncio

    from cluster.codec import FileSource, NetworkSource, open_source
    from cluster.redaction import SourceAddress
    from cluster.wire.push import PushAgent, PushOptions

    if source in ("", "push"):
        raise ConfigError("SOURCE is empty; name a video file or an rtsp:// address")
    wanted = {"loop": loop, "realtime": realtime, "speed": speed}
    address = SourceAddress(source)
    opened = open_source(address, **(wanted if address.scheme in ("", "file", "demo") else {}))
    if isinstance(opened, NetworkSource) and (loop or realtime or speed != 1.0):
        raise ConfigError("--loop, --realtime and --speed are for files; a camera has its own pace")
    assert isinstance(opened, FileSource | NetworkSource)
    began_s = time.monotonic()
    with Progress(f"{address} → {camera} at {gateway}") as progress:

        def show(status: PushStatus) -> None:
            # An error is raised next, and reported by the caller.
            if status.state != "error":
                progress.show(_progress_text(status, time.monotonic() - began_s), key=status.state)

        agent = PushAgent(
            opened,
            gateway,
            camera,
            options=PushOptions(give_up_s=give_up),
            on_progress=show,
            credentials=client_credentials,
        )
        status = asyncio.run(agent.run())
        show(status)
    if print_json(json, status):
        print(summary(status))


def summary(status: PushStatus) -> str:
    """Final status in one line."""
    lost = status.dropped + status.cluster_dropped
    again = f", {status.reconnects} reconnects" if status.reconnects else ""
    return f"sent {status.packets} packets, {status.bytes / 1e6:.1f} MB, {lost} dropped{again}"


def _progress_text(status: PushStatus, seconds: float) -> str:
    text = f"{status.state.value}: {status.packets} packets, {status.bytes / 1e6:.1f} MB"
    text += f", {status.bytes / max(1e-3, seconds) / 1e6:.2f} MB/s"
    if status.dropped or status.cluster_dropped:
        text += f", dropped {status.dropped} here and {status.cluster_dropped} in the cluster"
    return text + (f" ({status.reason})" if status.reason else "")
