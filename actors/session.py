"""A driver's connection to Ray: a private Ray instance on this machine, or an existing cluster."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Collection
from typing import Any

import psutil
import ray
from ray._private import auto_init_hook, services
from ray._private import utils as ray_utils
from ray._private.node import Node

from actors.remote import NAMESPACE
from cluster.errors import ConfigError, SightlineError, first_line

log = logging.getLogger(__name__)

FLAGS = {
    # Serve only restarts replicas: frames and answers use their own gRPC servers.
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
    # A replica whose engine is stuck cannot stop gracefully.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nobody reads Ray's list of calls; at the end, a driver whose control store has died would offer it for 5 s.
    "RAY_task_events_report_interval_ms": "0",
    # Process logs in the session folder are otherwise unbounded.
    "RAY_ROTATION_MAX_BYTES": str(10 * 2**20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # Processes without a GPU of their own may still share one by number (model.device: cuda:0).
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""One compute thread per process: decoders run a thread per camera, and the replica sets its own number, whose threads
sleep while they wait for each other: on cores that are shared with decoders, spinning takes many times the work."""

# Processes of a failed start that have not ended within this are killed.
_LEFTOVERS_S = 1.0

_GCS_S = 10.0
"""Timeout for asking an existing Ray cluster for its nodes."""

_KINDS = ("Alerting", "Controller", "Decoder", "Gateway", "ReconcilerActor", "ServeReplica:sightline", "TierNode")
_ACTOR_TITLES = tuple(f"ray::{kind}" for kind in _KINDS)

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's minimum: nothing large goes through the object store."""


class RaySession:
    """Connection from :meth:`start` to :meth:`stop`; a private Ray leaves no process behind."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._started = False
        self._processes: set[psutil.Process] = set()
        self._vital: dict[str, psutil.Process] = {}
        self._failure: str | None = None

    @property
    def private(self) -> bool:
        """Whether Ray runs for this session alone."""
        return self._address is None

    @property
    def host(self) -> str | None:
        """Address on which processes listen for each other; ``None``: their node's."""
        return "127.0.0.1" if self.private else None

    @property
    def log_dir(self) -> str:
        """Folder in which Ray keeps the logs of this node's processes."""
        node = ray._private.worker._global_node
        return "the folders of Ray's nodes" if node is None else str(node.get_logs_dir_path())

    def start(self) -> None:
        """Start or connect. Raises ``ConfigError``: no Ray cluster at the configured address, or this process is
        already connected to one; ``SightlineError``: a private Ray failed to start twice."""
        if ray.is_initialized():
            raise ConfigError("this process is already connected to Ray; run one cluster per process")
        os.environ.update(FLAGS)
        _mute_ray()
        # Otherwise a call from a thread that outlives stop() would start Ray again.
        auto_init_hook.enable_auto_connect = False
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
        if self.private:
            # Ignore a Ray cluster named in the environment.
            options |= {"address": "local", "object_store_memory": OBJECT_STORE_BYTES}
            small_head()
            _start_private(options | {"_node_ip_address": self.host})
        else:
            options["address"] = self._address
            try:
                _init(options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"no Ray cluster answers at {self._address!r} (cluster.ray_address): {first_line(error)}; "
                    "if it requires a token, set RAY_AUTH_MODE=token here as well"
                ) from None
        self._started = True
        self._vital = _vital_processes()

    def failure(self) -> str | None:
        """Names an essential process that has died; ``None`` while Ray runs. Call it often: once a parent has died,
        only children seen by an earlier call are found."""
        if self._failure is None:
            self._note_processes()
            if dead := sorted(name for name, process in self._vital.items() if not _is_alive(process)):
                self._failure = f"{' and '.join(dead)} of Ray died"
            elif not self.private and not _gcs_answers():
                self._failure = f"Ray's control store has not answered for {_GCS_S:g} s"
        return self._failure

    def stop(self, timeout_s: float) -> None:
        """Disconnect. A private Ray and all its processes end within ``timeout_s`` or are killed; local processes of an
        existing Ray that died are killed as well."""
        if not self._started:
            return
        self._started = False
        failed = self.failure() is not None
        ray.shutdown()
        if self.private or failed:
            # If Ray failed, nobody else stops them.
            _end(self._processes, _LEFTOVERS_S if failed else timeout_s)

    def _note_processes(self) -> None:
        self._processes = {process for process in self._processes if _is_alive(process)}
        if self.private:
            found = set(psutil.Process().children(recursive=True)) - self._processes
            self._processes.update(process for process in found if _is_rays(process))
        else:
            with contextlib.suppress(KeyError, psutil.NoSuchProcess):
                found = set(self._vital["raylet"].children()) - self._processes
                self._processes.update(process for process in found if _is_our_actor(process))


def _init(options: dict[str, Any]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    keeps = callable(handler) and threading.current_thread() is threading.main_thread()
    set_handler, resolve = ray_utils.set_sigterm_handler, services.resolve_ip_for_localhost
    if keeps:
        ray_utils.set_sigterm_handler = lambda _: None
    if options["address"] == "local":
        # Ray would replace a node's loopback address by its external one, and listen on all.
        services.resolve_ip_for_localhost = lambda host: host
    before = {key: os.environ[key] for key in ONE_THREAD if key in os.environ}
    os.environ.update(ONE_THREAD)
    try:
        ray.init(**options)
    finally:
        for key in ONE_THREAD:
            del os.environ[key]
        os.environ.update(before)
        ray_utils.set_sigterm_handler, services.resolve_ip_for_localhost = set_handler, resolve
    if keeps:
        # The handler of Ray's native library aborts the process.
        signal.signal(signal.SIGTERM, handler)


def _start_private(options: dict[str, Any]) -> None:
    """Start Ray on this machine, retrying once: its fixed deadline of 30 s can be too short on a busy machine. Raises
    ``SightlineError``: it did not start; nothing is left running."""
    for again in (True, False):
        before = {process.pid for process in _rays_processes()}
        try:
            _init(options)
            return
        # Ray raises a bare Exception when its node is late; an interrupt must not leave anything running either.
        except BaseException as error:
            ray.shutdown()
            _end([process for process in _rays_processes() if process.pid not in before], _LEFTOVERS_S)
            if not isinstance(error, Exception):
                raise
            if not again:
                raise SightlineError(f"Ray did not start: {first_line(error)}") from None
            log.warning("Ray did not start (%s); trying once more", first_line(error))


def _rays_processes() -> list[psutil.Process]:
    """Children of this process that belong to Ray."""
    return [process for process in psutil.Process().children(recursive=True) if _is_rays(process)]


def _vital_processes() -> dict[str, psutil.Process]:
    """Essential processes of this machine's Ray node, by name."""
    node = ray._private.worker._global_node
    if node is None:
        return {}  # A ray:// address: Ray runs elsewhere.
    marks = {"raylet": f"--raylet_socket_name={node.raylet_socket_name}", "gcs_server": node.get_session_dir_path()}
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            name = process.name()
            if name in marks and any(marks[name] in part for part in process.cmdline()):
                found[name] = process
    return found


def _gcs_answers() -> bool:
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):
            ray.nodes()
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(_GCS_S)


def _is_our_actor(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[0].startswith(_ACTOR_TITLES)
    except (psutil.Error, IndexError):
        return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(processes: Collection[psutil.Process], timeout_s: float) -> None:
    """Wait for terminating processes; kill the rest."""
    _, left = psutil.wait_procs(processes, timeout=timeout_s)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5.0)


def _is_rays(process: psutil.Process) -> bool:
    """Whether a child belongs to Ray and not to the caller."""
    try:
        ancestry = [process, *process.parents()]
        return any(
            "raylet" in p.name() or "gcs_server" in p.name() or "/ray/" in " ".join(p.cmdline()) for p in ancestry
        )
    except psutil.Error:
        return True


def small_head() -> None:
    """Start Ray nodes from this process without autoscaler, log monitor and dashboard server, which the rest would wait
    for."""
    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        setattr(Node, name, lambda *_, **__: None)


def _mute_ray() -> None:
    """Log worker deaths instead of letting Ray print them to standard error, into the CLI's live table."""
    from ray._private import worker

    worker.print_to_stdstream = lambda data, *_, **__: log.debug("ray: %s", data.get("lines"))
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
