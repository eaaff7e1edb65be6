"""``sightline doctor``: diagnoses this machine or a running cluster and suggests remedies."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.cli.doctor_cluster import Finding, cluster_findings
from actors.cli.options import Json, Settings, State, connect, parse_settings
from actors.cli.output import console, make_table, print_json, size
from cluster import __version__
from cluster.errors import ConfigError, SightlineError, install_hint

if TYPE_CHECKING:
    from cluster.config import SightlineConfig

WAIT_S = 5.0


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="Configuration that this machine is to run.")
    ] = None,
    settings: Settings = None,
    state: State = "",
    gateway: Annotated[
        str, typer.Option("--gateway", "-g", metavar="HOST:PORT", help="Check the running cluster behind this gateway.")
    ] = "",
    json: Json = None,
) -> None:
    """Check this machine: versions, GPU driver, NVDEC, disk, folders, clock, ports, Redis, model. Starts nothing. With
    --gateway, check a running cluster: cameras, quality, windows, replicas, memory tiers, alerts and their sinks.

    Exits with code 1 if something is wrong; warnings alone leave it 0.

    $ sightline doctor -c configs/minimal.yaml

    $ sightline doctor --gateway 127.0.0.1:50051
    """
    from rich.text import Text

    from actors.cli.serve import with_state
    from cluster.config import load_config

    if gateway:
        if config is not None or settings:
            raise ConfigError("--gateway checks a running cluster, --config and --set this machine; give one of them")
        with connect(gateway) as client:
            found = list(cluster_findings(client))
    else:
        found = list(findings(with_state(load_config(config, parse_settings(settings)), state)))
    if print_json(json, [each._asdict() for each in found]):
        style = {"ok": "green", "warning": "yellow", "wrong": "bold red"}
        rows = [(each.what, Text(each.state, style[each.state]), each.found, each.remedy) for each in found]
        console().print(make_table("!what|!state|found|what to do", rows))
    if any(each.state == "wrong" for each in found):
        raise typer.Exit(1)


def findings(config: SightlineConfig) -> Iterator[Finding]:
    """Findings of every check of this machine, in order."""
    from actors.preflight import cautions, check_folders, check_ray, check_settings, free_ports
    from cluster.config.memory import held_text
    from cluster.config.root import every_camera

    yield _versions()
    # The processes of a Ray cluster may be on any machine.
    ray = config.cluster.ray_address
    if ray is not None:
        yield _checked("Ray", f"answers at {ray}", partial(check_ray, ray))
    else:
        yield from _gpu(config)
        yield from _disks(config)
        yield _checked("folders", "can be written", partial(check_folders, config))
        yield _checked("ports", "free", partial(free_ports, config))
    yield _clock()
    if config.tiers.redis_url is not None:
        yield redis_finding(config)
    yield _checked("model and settings", config.model.name, partial(check_settings, config))
    memory, token = every_camera(config).memory, config.memory.token_bytes(config.model)
    if memory.enabled and token and config.engine == "native":
        yield Finding("memory.cap", "ok", held_text(memory.cap or 0, token))
    yield from (Finding.from_message("caution", "warning", sentence) for sentence in cautions(config))


def _checked(what: str, good: str, check: Callable[[], object]) -> Finding:
    try:
        check()
    except SightlineError as error:
        return Finding.from_message(what, "wrong", error)
    return Finding(what, "ok", good)


def _versions() -> Finding:
    have: dict[str, str | None] = {}
    for package in ("torch", "transformers", "av", "ray", "grpcio"):
        try:
            have[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            have[package] = None
    missing = [package for package, found in have.items() if found is None]
    text = ", ".join(f"{name} {version}" for name, version in have.items() if version)
    remedy = f"make setup, or {install_hint('cluster')}" if missing else ""
    said = f"sightline {__version__}, python {platform.python_version()}, {text}"
    return Finding("versions", "wrong" if missing else "ok", said, remedy)


def _gpu(config: SightlineConfig) -> Iterator[Finding]:
    from cluster.codec.nvdec import NvdecError, shared_nvdec
    from cluster.models.loading import find_device

    device = config.model.device
    asked = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    driver = "; ".join(_output_of(*asked).splitlines())
    if device.startswith("cuda") and config.engine != "simulated":
        # A driver alone is not enough, and a container may lack nvidia-smi.
        found = _checked("GPU driver", driver or f"torch works on {device}", partial(find_device, device))
        remedy = found.remedy and "install NVIDIA's driver and a build of torch with CUDA, or model.device: cpu"
        yield found._replace(remedy=remedy)
    else:
        yield Finding("GPU driver", "ok", driver or "none; the model runs on the CPU")
    try:
        shared_nvdec().check()
        yield Finding("NVDEC", "ok", "decodes")
    except NvdecError as error:
        wishes = {config.cluster.decode, *(camera.decode for camera in config.cameras)}
        state = "wrong" if "cuda" in wishes else "warning" if "auto" in wishes and not error.absent else "ok"
        remedy = "" if state == "ok" else "give the container the driver capability video, or set cluster.decode: cpu"
        yield Finding("NVDEC", state, f"not used: {error}", remedy)


def _disks(config: SightlineConfig) -> Iterator[Finding]:
    """Free space of each disk that is written to, named by its fastest-growing folder."""
    from actors.preflight import named_folders
    from cluster.alerts.dispatcher import LEAST_FREE_BYTES

    seen: set[int] = set()
    for key, folder in (named_folders(config) or {"--state": Path()}).items():
        # Path.exists raises without permission to look; the check "folders" reports that.
        there = next(each for each in (folder, *folder.resolve().parents) if os.path.exists(each))  # noqa: PTH110
        disk = there.stat().st_dev
        if disk in seen:
            continue
        seen.add(disk)
        free = shutil.disk_usage(there).free
        short = free <= LEAST_FREE_BYTES
        remedy = f"free some space, or choose another {key}; clips stop below clips.keep_free" if short else ""
        yield Finding("disk", "warning" if short else "ok", f"{size(free)} free for {folder}", remedy)


def _clock() -> Finding:
    synchronised = _output_of("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    if synchronised == "yes":
        return Finding("clock", "ok", "synchronised")
    if synchronised == "no":
        return Finding("clock", "warning", "not synchronised", "run chrony or systemd-timesyncd for correct timestamps")
    remedy = "check it on the host: incidents are timestamped"
    return Finding("clock", "warning", "cannot tell whether it is synchronised", remedy)


def redis_finding(config: SightlineConfig) -> Finding:
    """Whether the Redis server of ``tiers.redis_url`` answers and is configured to store memories."""
    import redis

    from cluster.control.fleet_settings import room_shortage
    from cluster.redaction import SourceAddress

    url = str(config.tiers.redis_url)
    shown = str(SourceAddress(url))
    try:
        client = redis.Redis.from_url(url, socket_timeout=WAIT_S, socket_connect_timeout=WAIT_S)
        # Not CONFIG, which hosted Redis services disable.
        told: Any = client.info()
    except redis.RedisError as error:
        return Finding("Redis", "wrong", f"{shown}: {error}", "start it, or correct tiers.redis_url")
    policy, most = str(told.get("maxmemory_policy", "")), int(told.get("maxmemory", 0))
    if told.get("slave_read_only"):
        return Finding("Redis", "wrong", f"{shown} is a read-only replica", "name its primary in tiers.redis_url")
    if told.get("cluster_enabled"):
        remedy = "name a server without cluster mode in tiers.redis_url"
        return Finding("Redis", "wrong", f"{shown} is in cluster mode, which is not supported", remedy)
    if "allkeys" in policy and most:
        for sentence in room_shortage(config, f"maxmemory of {shown}", most):
            return Finding.from_message("Redis", "warning", sentence)
        return Finding("Redis", "ok", f"{shown} evicts by {policy}")
    remedy = "set maxmemory and maxmemory-policy allkeys-lru: otherwise it rejects writes when full, or is OOM-killed"
    return Finding("Redis", "warning", f"{shown} has maxmemory {most} and maxmemory-policy {policy}", remedy)


def _output_of(*command: str) -> str:
    """Standard output of a command; empty if it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
