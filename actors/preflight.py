"""Checks of a configuration and its environment before anything is started."""

import os
import random
import runpy
import socket
from importlib.util import find_spec
from pathlib import Path

from cluster.alerts.sinks import kafka
from cluster.config import SightlineConfig, camera_settings
from cluster.config.secrets import memory_secret, peer_tls, tls_files
from cluster.config.sources import bundled_remark
from cluster.control.fleet_settings import fleet_settings, memory_shortages, unknown_load
from cluster.decoder.footage.camera import clip_shortages
from cluster.engine.vllm.settings import VllmSettings, check_version, engine_gpus
from cluster.errors import ConfigError, at_most
from cluster.gateway.guard import make_guard
from cluster.models.catalog import check_model
from cluster.models.presets import PRESETS
from cluster.replica.engine import WARNING, configured_costs
from cluster.security.private_files import make_private_folder
from cluster.tracing import check_tracing
from cluster.types.cameras import several_cameras

MOST_REMARKS = 5
"""Maximum number of remarks shown; each covers all cameras that it applies to."""


def preflight(config: SightlineConfig) -> SightlineConfig:
    """Run every check. Returns the configuration with ports of 0 replaced by free ones, so that a restarted gateway
    keeps its address (several gateways each choose theirs when they start), and with the default cap of memories,
    because not every node has the model's files. Raises ``ConfigError``: one sentence that names what to change."""
    check_settings(config)
    config = config.model_copy(update={"memory": config.memory.with_cap(config.model, config.tiers)})
    if config.cluster.ray_address is not None:
        check_ray(config.cluster.ray_address)
        return config  # The gateway may run on another machine.
    check_gpus(config)
    check_folders(config)
    return free_ports(config)


def free_ports(config: SightlineConfig) -> SightlineConfig:
    """The configuration with ports of 0 replaced by free ones if it has one gateway. Raises ``ConfigError``: a port
    cannot be used."""
    gateway = config.gateway
    if config.cluster.gateways > 1:
        if gateway.port or gateway.http_port:
            raise ConfigError(
                f"{config.cluster.gateways} gateways on one machine cannot share ports; set gateway.port and "
                "gateway.http_port to 0, or cluster.gateways to 1, or name a Ray cluster in cluster.ray_address"
            )
        return config
    keys = ("port", "http_port")
    found: dict[str, int] = {}
    # A chosen port may equal the other one.
    while len(set(found.values())) < len(keys):
        found = {key: free_port(gateway.host, getattr(gateway, key), f"gateway.{key}") for key in keys}
    gateway = gateway.model_copy(update=found)
    return config.model_copy(update={"gateway": gateway})


def check_settings(config: SightlineConfig) -> None:
    """Check everything but addresses: model, costs, tokens, certificates and secrets. Raises ``ConfigError``: one
    sentence that names what to change."""
    if config.engine == "simulated":
        configured_costs(config)
    else:
        check_model(config.model.name, quantised=config.engine == "vllm")
    if config.engine == "vllm":
        check_version()
        if config.vllm.arguments:
            # Imports vLLM, which takes seconds: cheaper than a failing cluster start.
            VllmSettings(config.vllm.arguments, config.vllm.timeout_s).validated()
    fleet_settings(config)
    check_tracing(config.tracing)
    if config.alerts.enabled and any(sink.kind == "kafka" for sink in config.alerts.sinks):
        kafka.check_installed()
    make_guard(config.security)
    tls_files(config.security)
    peer_tls(config.security)
    memory_secret(config.security)


def check_gpus(config: SightlineConfig) -> None:
    """Check that this machine has the replicas' GPUs, without torch, which would allocate GPU memory. Raises
    ``ConfigError``: it has not."""
    device = config.model.device
    if not device.startswith("cuda") or config.engine == "simulated":
        return
    torch = find_spec("torch")
    build = runpy.run_path(str(Path(torch.origin).with_name("version.py"))) if torch and torch.origin else {}
    if not (build.get("cuda") or build.get("hip")):
        raise ConfigError(
            f"model.device is {device}, but the installed torch is a CPU build; install one with CUDA, or set "
            "model.device: cpu"
        )
    from ray._private.accelerators import get_accelerator_manager_for_resource

    gpus = get_accelerator_manager_for_resource("GPU")
    there, seen = gpus.get_current_node_num_accelerators(), gpus.get_current_process_visible_accelerator_ids()
    there = there if seen is None else min(there, len(seen))
    # With "cuda" Ray assigns each replica its GPU; it need not know of a shared one ("cuda:0").
    each = engine_gpus(config.vllm.arguments, config.engine)
    if device == "cuda" and there < each * config.cluster.replicas:
        raise ConfigError(
            f"model.device is cuda, {'a GPU' if each == 1 else f'{each} GPUs'} for each of {config.cluster.replicas} "
            f"replicas (cluster.replicas), but Ray finds {there} on this machine; set model.device: cuda:0 to share "
            "one, or cpu"
        )


def cautions(config: SightlineConfig) -> list[str]:
    """What may run otherwise than expected, each as ``problem; fix``."""
    said, name = [*clip_shortages(config), *memory_shortages(config), *unknown_load(config)], config.model.name
    if config.engine == "simulated":
        said.append(WARNING)
    elif name in PRESETS:
        said.append(
            f"model {name} has random weights: it costs what a trained one would, but its answers mean nothing; set "
            "model.name to the bundled model (demo), a checkpoint's folder or a hub id"
        )
    remarks: dict[str, list[str]] = {}
    for each in config.cameras:
        remarks.setdefault(bundled_remark(config, camera_settings(config, each)), []).append(each.name)
    told = [f"{several_cameras(names)}: {remark}" for remark, names in remarks.items() if remark]
    return said + at_most(MOST_REMARKS, told, " remarks on cameras; see sightline cameras list")


def named_folders(config: SightlineConfig) -> dict[str, Path]:
    """Folders on this machine that the configuration names, by key, fastest-growing first."""
    folders = {
        "clips.folder": config.clips.folder,
        "alerts.folder": config.alerts.folder,
        "--state (cluster.state_dir)": config.cluster.state_dir,
        "cluster.log_dir": config.cluster.log_dir,
        "security.audit_log": config.security.audit_log and str(Path(config.security.audit_log).parent),
    }
    return {key: Path(folder) for key, folder in folders.items() if folder is not None}


def check_folders(config: SightlineConfig) -> None:
    """Check that :func:`named_folders` can be created and written. Raises ``ConfigError``: one cannot."""
    for key, folder in named_folders(config).items():
        try:
            if key == "cluster.log_dir":
                # Not private: log collectors read it.
                folder.mkdir(parents=True, exist_ok=True)
            else:
                make_private_folder(folder)
            reason = "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            raise ConfigError(
                f"{folder} cannot be written: {reason}; choose another {key}, or let this user write there"
            )


# Linux assigns ephemeral ports from 32768 on, and Ray its workers' ports from 10002 to 19999.
_UNASSIGNED = range(20_000, 32_768)


def free_port(host: str, port: int, key: str) -> int:
    """``port``, or for 0 a free one outside the ephemeral range, hundreds of which are used while a cluster starts.
    Raises ``ConfigError``: it is in use, needs more rights, or the host is not this machine's."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror:
        raise ConfigError(f"gateway.host {host!r} is not a known address; use 127.0.0.1 or 0.0.0.0") from None
    reason = ""
    for candidate in [port] if port else [*random.sample(_UNASSIGNED, 50), 0]:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As servers do, to count ports with connections in TIME_WAIT as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, candidate))
                probe.listen(1)
                return int(probe.getsockname()[1])
        except OSError as error:
            reason = error.strerror or str(error)
    raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another {key}, or 0 for any free one")


def check_ray(address: str) -> None:
    """Check that something listens at a Ray cluster's address: Ray itself would retry for minutes. Raises
    ``ConfigError``: nothing does."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # "auto" and the like, which Ray resolves.
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r} (cluster.ray_address): {error.strerror or error}; "
            "start one with `ray start --head`, or omit the key to start one on this machine"
        ) from None
