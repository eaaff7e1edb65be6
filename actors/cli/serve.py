"""``sightline serve``: a cluster in the foreground."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from actors.cli.options import Json, Settings

WATCH_S = 2.0
"""Interval of checking that the cluster still runs."""


def serve(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="Configuration file (YAML); see `sightline config`.")
    ],
    settings: Settings = None,
    json: Json = None,
) -> None:
    """Start a cluster and keep it running until Ctrl-C or SIGTERM. Ends with exit code 1 when the cluster does.

    Starts the gateway, the controller, the decoders and the model replicas on this machine (or on the Ray cluster that
    cluster.ray_address names), then prints where they listen. With --json the addresses are also written to FILE
    as soon as everything is ready, for scripts that wait for it.

    $ sightline serve -c configs/minimal.yaml

    $ sightline serve -c configs/city.yaml --set gateway.port=6000 --set cluster.replicas=2
    """
    from rich.markup import escape

    from actors.cli.options import parse_settings
    from actors.cli.output import console, plural, write_json
    from cluster.config import load_config
    from cluster.config.sources import check_files
    from cluster.errors import SightlineError
    from cluster.models.catalog import PRESETS

    loaded = load_config(config, parse_settings(settings))
    check_files(loaded, *loaded.cameras)
    screen = console(stderr=json == "-")
    stop = threading.Event()
    failure: str | None = None
    with screen.status("loading the libraries") as status:
        from actors.runtime import Cluster
        from cluster.decoder.footage.camera import clip_shortages
        from cluster.replica.simulated import WARNING

        cluster = Cluster(loaded, on_phase=status.update if screen.is_terminal else screen.print)
        cluster.start()
    try:
        # Ray has installed a handler that exits without cleanup.
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        if json is not None:
            write_json(json, {"gateway": cluster.gateway_address, "metrics": cluster.metrics_address})
        if loaded.engine == "simulated":
            screen.print(f"[bold yellow]warning[/]  {WARNING}")
        elif loaded.model.name in PRESETS:
            screen.print(f"[bold yellow]warning[/]  {random_weights(loaded.model.name)}")
        for sentence in clip_shortages(loaded):
            screen.print(f"[bold yellow]warning[/]  {escape(sentence)}")
        scheme = "http" if loaded.security.tls.certificate is None else "https"
        screen.print(
            f"[bold green]ready[/]    {plural(len(loaded.cameras), 'camera')}, model {loaded.model.name}\n"
            f"gRPC     {cluster.gateway_address}\n"
            f"console  {scheme}://{cluster.metrics_address}/\n"
            f"metrics  {scheme}://{cluster.metrics_address}/metrics\n"
            f"answers  sightline watch --gateway {cluster.gateway_address}\n"
            "Stop it with Ctrl-C."
        )
        while failure is None and not stop.wait(WATCH_S):
            failure = cluster.failure()
    finally:
        with screen.status("stopping"):
            cluster.stop()
        if failure is None:
            screen.print("stopped")
    if failure is not None:
        raise SightlineError(f"the cluster has ended: {failure}; its logs say why")


def random_weights(name: str) -> str:
    """Notice for a preset, which has random weights."""
    return (
        f"model {name} has random weights: it costs what a trained one would, and its answers mean nothing; "
        "model.name names the bundled model (demo), a checkpoint's folder or a hub id"
    )
