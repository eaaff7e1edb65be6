"""``sightline serve``: a cluster in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from actors.cli.options import Config, Json, Settings, State, parse_settings
from actors.cli.output import check_json_target, console, plural, print_json, trouble_lines
from cluster.errors import SightlineError, at_most

if TYPE_CHECKING:
    from actors.runtime import Cluster
    from cluster.config import SightlineConfig
    from cluster.types import CameraStatus

WATCH_S = 2.0
"""Seconds between checks that the cluster still runs."""

MOST_LINES = 10
"""Maximum number of changes printed per check."""

CONNECT_S = 5.0
"""Seconds that cameras get to connect before *ready* is printed, with the problems of those that have not."""


def serve(
    config: Config,
    settings: Settings = None,
    state: State = "",
    json: Json = None,
) -> None:
    """Start a cluster and run it until Ctrl-C, SIGTERM or SIGHUP. Exits with code 1 if the cluster ends by itself.

    Starts the gateway, the controller, the decoders and the model replicas on this machine (or on the Ray cluster at
    cluster.ray_address), then prints their addresses. --json also writes the addresses to FILE once everything is
    ready, for scripts that wait for it.

    $ sightline serve -c configs/minimal.yaml

    $ sightline serve -c configs/minimal.yaml --set gateway.port=6000 --set cluster.replicas=2
    """
    from rich.markup import escape

    from cluster.config import load_config

    loaded = with_state(load_config(config, parse_settings(settings)), state)
    if json not in (None, "-") and Path(json).is_file() and not Path(json).is_symlink():
        # A waiting script must not read the addresses of an earlier run.
        Path(json).unlink()
    check_json_target(json)
    screen = console(stderr=json == "-")
    stop = threading.Event()
    failure: str | None = None

    def terminate(*_: object) -> None:
        stop.set()
        # Exit code 0, even while the libraries are loading: the stop was requested.
        sys.exit()

    # Closing the terminal stops it too, except under nohup.
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    ends = [signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]
    for each in ends:
        signal.signal(each, terminate)
    sys.unraisablehook = _report_unraisable
    with screen.status("loading the libraries") as status:
        from actors.cli.doctor import redis_finding
        from actors.preflight import cautions
        from actors.runtime import Cluster

        show = status.update if screen.is_terminal else screen.print

        def on_phase(phase: str) -> None:
            if stop.is_set():
                # Python drops exceptions raised during a fork, and Ray forks many processes.
                raise SystemExit
            show(phase)

        if loaded.tiers.redis_url is not None and loaded.cluster.ray_address is None:
            redis = redis_finding(loaded)
            if redis.state == "wrong":
                screen.print(f"[bold yellow]warning[/]  Redis {escape(redis.found)}; {escape(redis.remedy)}")
        cluster = Cluster(loaded, on_phase=on_phase)
        try:
            cluster.start()
        except SystemExit:
            # ``start`` has already stopped whatever had started.
            screen.print("stopped")
            return
    try:
        # From here on the signals end the wait below.
        for each in ends:
            signal.signal(each, lambda *_: stop.set())
        others = {} if len(cluster.gateways) == 1 else {"gateways": [asdict(each) for each in cluster.gateways]}
        print_json(json, {"gateway": cluster.gateway_address, "metrics": cluster.metrics_address, **others})
        for sentence in cautions(loaded):
            screen.print(f"[bold yellow]warning[/]  {escape(sentence)}")
        cameras = connected_cameras(cluster)
        troubles = trouble_lines(cameras)
        for line in troubles:
            screen.print(f"[bold red]camera[/]   {escape(line)}")
        silent = f", {len(troubles)} without pictures" if troubles else ""
        scheme = "http" if loaded.security.tls.certificate is None else "https"
        screen.print(
            f"[bold green]ready[/]    {plural(len(cameras), 'camera')}{silent}, "
            f"model {escape(loaded.model.name)}\n"
            f"gRPC     {', '.join(each.rpc for each in cluster.gateways)}\n"
            f"console  {', '.join(f'{scheme}://{local(each.metrics)}/' for each in cluster.gateways)}\n"
            f"metrics  {scheme}://{local(cluster.metrics_address)}/metrics\n"
            f"state    {escape(state_text(loaded))}\n"
            f"answers  sightline watch --gateway {local(cluster.gateway_address)}\n"
            "Stop with Ctrl-C."
        )
        known, errors = cluster.parts, console(stderr=True)
        while failure is None and not stop.wait(WATCH_S):
            failure, now = cluster.failure(), cluster.parts
            for line in changes(known, now):
                errors.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, highlight=False)
            known = now
    finally:
        with screen.status("stopping"):
            cluster.stop()
        if failure is None:
            screen.print("stopped")
    if failure is not None:
        raise SightlineError(f"the cluster has ended: {failure}; see its logs")


def _report_unraisable(raised: sys.UnraisableHookArgs) -> None:
    """Print exceptions that Python drops, except a requested exit, which ``on_phase`` raises again."""
    if raised.exc_type is not SystemExit:
        sys.__unraisablehook__(raised)


def with_state(config: SightlineConfig, option: str) -> SightlineConfig:
    """The configuration with the state folder from ``--state``, from itself, or the user's default. On an existing Ray
    cluster the default is none: its processes may be on any machine."""
    folder = option or config.cluster.state_dir
    if folder is None and config.cluster.ray_address is None:
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        folder = str(Path(base, "sightline"))
    chosen = None if folder in (None, "none") else str(Path(folder).expanduser().resolve())
    cluster = config.cluster.model_copy(update={"state_dir": chosen})
    return config.model_copy(update={"cluster": cluster})


def local(address: str) -> str:
    """An address for clients on this machine: no certificate is valid for 0.0.0.0, and no token is sent there."""
    host, _, port = address.rpartition(":")
    return f"localhost:{port}" if host in ("0.0.0.0", "[::]") else address


def state_text(config: SightlineConfig) -> str:
    """Which state of the cluster survives a restart, and where."""
    folder, alerts = config.cluster.state_dir, config.alerts.folder
    places = {"incidents": alerts, "clips": config.clips.folder or alerts}
    there = "".join(f"; {what} are in {place}" for what, place in places.items() if place)
    if folder is None:
        lost = "" if alerts else ", and so are incidents"
        return f"none: added cameras are lost when this cluster ends{lost}{there}"
    kept = ", ".join(["cameras", *(what for what, place in places.items() if not place)])
    remembered = "" if config.tiers.redis_url else "; memories are lost when the cluster ends (see tiers.redis_url)"
    return f"{folder}: {kept}{there}{remembered}"


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each part of a cluster (``Cluster.parts``) that changed, at most :data:`MOST_LINES`; none at the first
    check."""
    if not before:
        return []
    again = {name for name, text in now.items() if text.startswith("runs") and before.get(name, "").startswith("runs")}
    told = [
        f"{name}: {'died, and ' if name in again else ''}{text or 'works again'}"
        for name, text in now.items()
        if text != before.get(name, "")
    ]
    told += [f"{name}: ended" for name in before if name not in now]
    return at_most(MOST_LINES, told, " changes")


def connected_cameras(cluster: Cluster) -> list[CameraStatus]:
    """Status of all cameras, once none is still connecting or after :data:`CONNECT_S`."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        cameras = cluster.cameras()
        pending = [each for each in cameras if each.state == "connecting" or (each.state == "waiting" and each.source)]
        if not pending or time.monotonic() > deadline:
            return cameras
        time.sleep(0.2)
