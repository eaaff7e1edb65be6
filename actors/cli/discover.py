"""``sightline cameras discover``: ONVIF cameras of a network, offered as a file to edit and apply."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.options import DEFAULT_GATEWAY, Gateway, connect
from actors.cli.output import save

if TYPE_CHECKING:
    from cluster.types.cameras import DiscoveredCamera

PASSWORD, ESCAPED = "CAMERA_PASSWORD", "CAMERA_PASSWORD_ESCAPED"

HOW_TO_ESCAPE = (
    f"export {ESCAPED}=$(python3 -c "
    f"""'import os, urllib.parse as u; print(u.quote(os.environ["{PASSWORD}"], safe=""))')"""
)


def discover(
    network: Annotated[str, typer.Argument(metavar="NETWORK", help="IPv4 network, like 10.0.0.0/24.")],
    user: Annotated[str, typer.Option(metavar="NAME", help="The cameras' user.")] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write them as a file for `sightline cameras apply`."),
    ] = None,
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Search a network for ONVIF cameras and list their streams; nothing is added.

    The network must be within `security.discovery_networks`. The password of --user is read from the variable
    CAMERA_PASSWORD, or asked for. Files refer to CAMERA_PASSWORD_ESCAPED: the same password percent-escaped, as it
    must be in an address.

    $ sightline cameras discover 10.0.0.0/24 --user viewer -o found.yaml && sightline cameras apply -f found.yaml
    """
    import os
    import sys

    password = os.environ.get(PASSWORD, "") if user else ""
    if user and not password:
        password = typer.prompt("Password", hide_input=True, err=True)
    found: list[DiscoveredCamera] = []
    with connect(gateway) as client:
        for each in client.discover(network, user, password):
            if sys.stderr.isatty():
                done = f"{each.probed}/{each.total} addresses, {each.asked}/{each.answered} devices"
                print(f"\r{done}", end="", file=sys.stderr, flush=True)
            if each.camera is not None:
                found.append(each.camera)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    for camera in found:
        print(f"{camera.address}  {camera.name or 'unnamed'}{f': {camera.error}' if camera.error else ''}")
        for stream in camera.streams:
            rate = f" at {stream.fps:g} fps" if stream.fps else ""
            print(f"  {stream.profile}: {stream.codec} {stream.width}x{stream.height}{rate}  {stream.source}")
    if not found:
        print("no ONVIF camera answers")
    if output is not None:
        written = _document(found, user).encode()
        save(output, [written], len(written), str(output))


def _document(found: list[DiscoveredCamera], user: str) -> str:
    """The first stream of each camera, others as comments."""
    from urllib.parse import quote

    import yaml

    credentials = f"{quote(user, safe='')}:${{{ESCAPED}}}@" if user else ""
    lines = ["# Keep, rename and edit what is to be added."]
    if user:
        lines += [f"# Set {ESCAPED} to the cameras' password, percent-escaped:", f"#   {HOW_TO_ESCAPE}"]
    lines.append("cameras:" if any(camera.streams for camera in found) else "cameras: []")
    for camera in found:
        for number, stream in enumerate(camera.streams):
            name = re.sub(r"[^a-z0-9]+", "-", f"{camera.name} {camera.address.split(':')[0]}".lower()).strip("-")
            source = stream.source.replace("://", f"://{credentials}", 1)
            entry = yaml.safe_dump([{"name": name, "source": source}], sort_keys=False, width=1000).rstrip()
            lines += [f"{'# ' if number else '  '}{line}" for line in entry.splitlines()]
    return "\n".join(lines) + "\n"
