"""``sightline replicas``: load of each replica, and draining one before it is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.options import DEFAULT_GATEWAY, Gateway, Json, connect
from actors.cli.output import console, make_table, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.types.reports import ReplicaStatus

app = typer.Typer(no_args_is_help=True, help="Show the load of replicas; drain one.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the replica, as shown by `replicas list`.")]


@app.command("list")
def list_replicas(gateway: Gateway = DEFAULT_GATEWAY, json: Json = None) -> None:
    """List replicas: cameras, load and expected lag; and, if the number of decoders follows the load, how many run and
    are wanted.

    $ sightline replicas list

    $ sightline replicas list --json - | jq '.[] | select(.draining and .held == 0) | .name'
    """
    with connect(gateway) as client:
        replicas, decoders = client.replicas_and_decoders()
    if print_json(json, replicas):
        console().print(_replicas_table(replicas) if replicas else "no replica is ready", markup=False)
        for each in replicas:
            if said := "; ".join(filter(None, (each.trouble, each.memory))):
                console().print(f"{each.name}: {said}", markup=False)
        if decoders is not None:
            between = f"between {decoders.least} and {decoders.most}"
            print(f"decoders: {decoders.running} running, {decoders.wanted} wanted by their load, {between}")


@app.command("drain")
def drain(
    name: Name,
    undo: Annotated[bool, typer.Option("--undo", help="Stop draining: it gets cameras again.")] = False,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Move a replica's cameras to the others; it gets none until it is restarted.

    Stop it once `replicas list` shows that it holds no camera.

    $ sightline replicas drain replica-1

    $ sightline replicas drain replica-1 --undo
    """
    with connect(gateway) as client:
        status = client.replica_drain(name, undo=undo)
    if print_json(json, status):
        print(f"{name}: accepts cameras again" if undo else f"{name}: drained; it still holds {status.held} cameras")


def _replica_state(replica: ReplicaStatus) -> str:
    if replica.draining:
        return "draining" if replica.held else "drained"
    return "no engine" if replica.trouble else "ready"


def _replicas_table(replicas: Sequence[ReplicaStatus]) -> Table:
    rows = [
        (
            each.name,
            _replica_state(each),
            str(each.cameras),
            str(each.held),
            str(each.lowered),
            f"{each.utilisation:.0%}" if each.utilisation else "",
            f"{each.backlog_s:.1f} s",
            f"{each.expected_lag_s:.2f} s" if each.expected_lag_s else "",
        )
        for each in replicas
    ]
    return make_table("!replica|!state|>cameras|>held|>below full quality|>full by|>backlog|>expected lag", rows)
