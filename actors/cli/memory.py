"""``sightline memory`` and ``sightline forget``: status of a camera's memory, and deleting it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.options import (
    DEFAULT_GATEWAY,
    Gateway,
    Json,
    Yes,
    confirm_deletion,
    connect,
    parse_duration,
    spoken,
)
from actors.cli.output import console, make_table, plural, print_json, size, works_or
from cluster.lab.report.number_format import compact

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.types import MemoryStatus

Name = Annotated[str, typer.Argument(metavar="CAMERA", help="Name of the camera.")]


def memory(camera: Name, gateway: Gateway = DEFAULT_GATEWAY, json: Json = None) -> None:
    """Show the status of a camera's memory: time range, size by tier, and policies.

    $ sightline memory gate

    $ sightline memory gate --json - | jq .tier_bytes
    """
    with connect(gateway) as client:
        status = client.memory(camera)
    if print_json(json, status):
        screen = console()
        screen.print("\n".join(summary(status)), markup=False)
        screen.print(tiers_table(status))


def forget(
    camera: Name,
    before: Annotated[str, typer.Option(metavar="DURATION", help="Only what is older than 90s, 10m, 2h, 1d.")] = "",
    yes: Yes = False,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Delete what a camera saw: its memory in every tier, conversations, snapshots, clips and incidents. Prints what
    was deleted; cannot be undone.

    $ sightline forget gate --before 2h

    $ sightline forget gate --yes
    """
    before_s = parse_duration(before, "--before") if before else 0.0
    if not before and not yes:
        confirm_deletion(camera, "--before DURATION")
    with connect(gateway) as client:
        forgotten = client.forget(camera, before_s)
    if print_json(json, forgotten):
        print(
            f"{camera}: deleted {plural(forgotten.frames, 'frame')}, {size(forgotten.bytes)} of memory; "
            f"{plural(forgotten.files, 'file')}, {size(forgotten.file_bytes)} of footage; "
            f"{plural(forgotten.incidents, 'incident')}, {plural(forgotten.alerts, 'alert')}"
        )


def summary(status: MemoryStatus) -> list[str]:
    """Size, policies and counters."""
    from cluster.types import MICROSECONDS

    if status.frames:
        span = spoken((status.newest - status.oldest) / MICROSECONDS)
        held = f"{plural(status.frames, 'frame')} over {span}, {compact(status.tokens)} tokens"
    else:
        held = "nothing yet"
    lines = [
        f"{status.camera}: {held}",
        f"compressor {status.compressor}, organiser {status.organiser}, retriever {status.retriever}",
    ]
    told = [f"{name.replace('_', ' ')} {compact(count)}" for name, count in status.counts.items() if count]
    return [*lines, "so far: " + ", ".join(told)] if told else lines


def tiers_table(status: MemoryStatus) -> Table:
    """One row per tier, fastest first, and one for frames not yet in any."""
    rows = []
    for name in {**status.tier_bytes, **status.tier_states}:
        stored = status.tier_bytes.get(name)
        trouble = status.tier_states.get(name)
        share = f"{100 * stored / status.cap_bytes:.0f} %" if stored is not None and status.cap_bytes else ""
        held = "" if stored is None else size(stored)
        rows.append((name, held, share, "" if trouble is None else works_or(trouble)))
    return make_table("tier|>!holds|>!of cap|state", rows)
