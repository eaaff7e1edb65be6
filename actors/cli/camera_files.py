"""``sightline cameras apply``, ``export`` and ``discover``: cameras as files."""

from __future__ import annotations

import os
import re
import sys
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.options import DEFAULT_GATEWAY, Gateway, Json, Output, connect
from actors.cli.output import Progress, console, plural, print_json, save
from cluster.errors import ConfigError, ManagedElsewhereError, SightlineError, UnavailableError, at_most
from cluster.files import replacing, writing
from cluster.security.private_files import open_private

if TYPE_CHECKING:
    from cluster.client import GatewayClient
    from cluster.config import CameraEntry
    from cluster.control.cameras.managed import Change
    from cluster.types.cameras import DiscoveredCamera

Takeover = Annotated[bool, typer.Option("--takeover", help="Take over cameras that belong to another manager.")]

PASSWORD, ESCAPED = "CAMERA_PASSWORD", "CAMERA_PASSWORD_ESCAPED"

HOW_TO_ESCAPE = (
    f"export {ESCAPED}=$(python3 -c "
    f"""'import os, urllib.parse as u; print(u.quote(os.environ["{PASSWORD}"], safe=""))')"""
)

MARKS = {"add": "+", "update": "~", "takeover": "!", "remove": "-", "conflict": "x", "same": "="}


def apply(
    file: Annotated[
        str,
        typer.Option("--file", "-f", metavar="FILE", help="YAML file, folder of such files, or - for standard input."),
    ],
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove cameras that were applied earlier and are no longer in the files.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change without changing it.")] = False,
    manager: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name for this set of files; other managers cannot change its cameras."),
    ] = "file",
    force: Annotated[bool, typer.Option("--force", help="Add cameras even if capacity is exceeded.")] = False,
    takeover: Takeover = False,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Apply camera files: add new cameras, and change the others while they run.

    A file has a `cameras:` list as in a configuration, or Camera resources. The cluster records the manager of each
    camera and refuses changes by others. If one camera in the files belongs to another manager, nothing is changed.

    $ sightline cameras apply -f cameras.yaml --dry-run

    $ sightline cameras apply -f cameras/ --prune
    """
    from rich.markup import escape

    from cluster.control.cameras.managed import CLUSTER, manager_from_outside, plan
    from cluster.kubernetes.resource import read_cameras

    if manager_from_outside(manager) == CLUSTER:
        raise ConfigError("--manager must not be 'cluster', which is reserved for `cameras add`; choose another")
    entries = read_cameras("standard input", _standard_input()) if file == "-" else read_cameras(Path(file))
    screen = console(stderr=json == "-")
    errors: dict[str, str] = {}
    unavailable = 0
    wanted = {entry.name: entry for entry in entries}
    with connect(gateway) as client:
        changes = plan(entries, client.cameras_export(secrets=True), manager, prune=prune, takeover=takeover)
        conflicts = [change for change in changes if change.kind == "conflict"]
        for change in changes:
            if change.kind == "same":
                continue
            # Each further call may wait for its deadline.
            if unavailable == 3:
                errors[change.name] = "not tried: the cluster became unavailable"
                continue
            owner = f" (belongs to {change.owner})" if change.owner else ""
            screen.print(f"{MARKS[change.kind]} {change.kind} {change.name}{owner}", markup=False)
            if change.kind in ("update", "takeover") or (dry_run and change.kind == "add"):
                for line in change.differences():
                    screen.print(f"    {line}", markup=False)
            if not dry_run and not conflicts:
                try:
                    _carry_out(client, change, wanted, manager, force=force)
                    unavailable = 0
                except SightlineError as error:
                    errors[change.name] = str(error)
                    unavailable += isinstance(error, UnavailableError)
                    screen.print(f"    [red]{escape(str(error))}[/red]")
    same = sum(change.kind == "same" for change in changes)
    done = len(changes) - same - len(errors)
    body = [
        {
            "camera": change.name,
            "change": change.kind,
            "owner": change.owner,
            "differences": change.differences(),
            "error": errors.get(change.name, ""),
        }
        for change in changes
    ]
    print_json(json, body)
    if conflicts:
        names = ", ".join(at_most(10, [f"{change.name} ({change.owner})" for change in conflicts]))
        raise ManagedElsewhereError(f"nothing was changed; these belong to other managers: {names}; see --takeover")
    what = "would change" if dry_run else "changed"
    screen.print(f"{plural(done, 'camera')} {what}, {same} unchanged")
    if errors:
        failed = ", ".join(at_most(10, [*errors]))
        raise SightlineError(f"{plural(len(errors), 'camera')} could not be changed: {failed}")


def _standard_input() -> str:
    try:
        # UTF-8 in every locale, as for files.
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigError("standard input is not UTF-8 text; cameras are YAML") from None


def _carry_out(
    client: GatewayClient, change: Change, entries: dict[str, CameraEntry], manager: str, *, force: bool
) -> None:
    from cluster.control.cameras.managed import settings_of

    if change.kind == "remove":
        client.camera_remove(change.name, manager=manager)
        return
    entry = entries[change.name]
    if change.kind == "add":
        client.camera_add(entry.name, entry.source, (), settings_of(entry), force=force, manager=manager)
    else:
        client.camera_update(
            entry.name, entry.source, settings_of(entry), manager=manager, takeover=change.kind == "takeover"
        )


def export(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Cameras; default all.")] = None,
    output: Output = None,
    manager: Annotated[str | None, typer.Option(metavar="NAME", help="Only the cameras of this manager.")] = None,
    secrets: Annotated[bool, typer.Option("--secrets", help="Write passwords instead of variable references.")] = False,
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Write cameras to a file for `apply`, or to standard output, with a variable for each secret in a source.

    $ sightline cameras export -o cameras.yaml
    """
    from cluster.control.cameras.managed import entry_to_json, with_variables
    from cluster.kubernetes.resource import as_yaml

    with connect(gateway) as client:
        cameras = client.cameras_export(names or (), secrets=secrets)
    entries: list[dict[str, object]] = []
    variables: dict[str, str] = {}
    for camera in cameras:
        if manager is not None and camera.manager != manager:
            continue
        # As written, `${` does not refer to a variable.
        entry = loads(entry_to_json(camera.entry, secrets=True).replace("${", "$${"))
        if not secrets:
            entry, named = with_variables(entry, variables)
            variables |= dict.fromkeys(named, camera.entry.name)
        entries.append(entry)
    comments = [f"Set {variable} to camera {name}'s password, URL-escaped." for variable, name in variables.items()]
    text = as_yaml(entries, comments)
    if output is None:
        sys.stdout.write(text)
        return
    with writing(output), replacing(output) as part, open(part, "w", encoding="utf-8", opener=open_private) as written:
        written.write(text)


def discover(
    network: Annotated[str, typer.Argument(metavar="NETWORK", help="IPv4 network, like 10.0.0.0/24.")],
    user: Annotated[str, typer.Option(metavar="NAME", help="User name on the cameras.")] = "",
    output: Output = None,
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Search a network for ONVIF cameras and list their streams; --output writes a file for `apply`. Adds nothing.

    The network must be within `security.discovery_networks`. The password of --user is read from CAMERA_PASSWORD or
    prompted for. The file refers to CAMERA_PASSWORD_ESCAPED: the same password, percent-escaped as URLs require.

    $ sightline cameras discover 10.0.0.0/24 --user viewer -o found.yaml && sightline cameras apply -f found.yaml
    """
    password = os.environ.get(PASSWORD, "") if user else ""
    if user and not password:
        if not sys.stdin.isatty():
            raise ConfigError(f"no terminal to ask for the password of {user!r}; set {PASSWORD}")
        password = typer.prompt("Password", hide_input=True, err=True)
    found: list[DiscoveredCamera] = []
    with connect(gateway) as client, Progress(f"searching {network}") as progress:
        for each in client.discover(network, user, password):
            devices = f"{each.probed}/{each.total} addresses, {each.asked}/{each.answered} devices"
            progress.show(devices, each.probed, each.total)
            if each.camera is not None:
                found.append(each.camera)
    for camera in found:
        print(f"{camera.address}  {camera.name or 'unnamed'}{f': {camera.error}' if camera.error else ''}")
        for stream in camera.streams:
            rate = f" at {stream.fps:g} fps" if stream.fps else ""
            print(f"  {stream.profile}: {stream.codec} {stream.width}x{stream.height}{rate}  {stream.source}")
    if not found:
        print("no ONVIF camera answered")
    if output is not None:
        written = _document(found, user).encode()
        save(output, [written], len(written), str(output))


def _document(found: list[DiscoveredCamera], user: str) -> str:
    """A file for `apply` with the first stream of each camera; its other streams are comments."""
    from urllib.parse import quote

    import yaml

    credentials = f"{quote(user, safe='')}:${{{ESCAPED}}}@" if user else ""
    lines = ["# Keep, rename and edit the cameras to add."]
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
