"""Initialisation common to the cluster's processes: logging to standard error, which Ray stores in its session folder,
and to ``log_dir``; the build-information metric and zero series."""

import asyncio
import fcntl
import gc
import hashlib
import importlib
import itertools
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TypeVar

from actors.remote import own_host
from cluster import __version__, metrics
from cluster.config import SightlineConfig
from cluster.config.cluster import ClusterConfig
from cluster.config.secrets import peer_tls
from cluster.logs import CountingHandler, JsonFormatter, TextFormatter
from cluster.metrics.zero_series import Role, create_zero_series
from cluster.redaction import KnownSecrets, redact_log
from cluster.redaction.known_secrets import redact_tracebacks
from cluster.wire.metrics_server import serve_metrics

log = logging.getLogger(__name__)
T = TypeVar("T")

EXIT_S, TOLD_S = 1.0, 60.0
"""Seconds until a process exits after a task has failed, and after one whose error a caller may still collect."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a process listens, ``host:port`` each: gRPC, and HTTP with its ``/metrics``."""

    rpc: str
    metrics: str


def run_task(work: Coroutine[Any, Any, T], *, told: type[Exception] | tuple[()] = ()) -> asyncio.Task[T]:
    """Run an essential task: when it fails, the process exits and Ray restarts it. A cancelled task may end in any way.

    ``told``: errors left to whoever awaits the task before the exit. After a restart nobody awaits it, and the cause,
    such as another's lock or port, may have passed.
    """
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))

    def ended(_: object) -> None:
        if task.cancelled() or task.cancelling() or (error := task.exception()) is None:
            return
        if isinstance(error, told):
            log.error("%s failed, so this process exits in %g s: %s", task.get_name(), TOLD_S, error)
        else:
            log.critical("%s failed, so this process exits to be restarted", task.get_name(), exc_info=error)
        # By then, waiting calls have received the error.
        asyncio.get_running_loop().call_later(TOLD_S if isinstance(error, told) else EXIT_S, os._exit, 1)

    task.add_done_callback(ended)
    return task


def import_uncollected(module: str) -> None:
    """Import a module without collecting garbage meanwhile, which for torch and transformers takes a fifth of the
    time: nearly all objects stay."""
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        gc.enable()


def show_replica(instance: str) -> socket.socket | None:
    """List a replica that has loaded its model in ``/proc/net/unix`` until this process ends, for its pod's readiness
    probe, which counts them. The caller must hold the socket."""
    if sys.platform != "linux":
        return None
    shown = socket.socket(socket.AF_UNIX)
    # An abstract name leaves no file behind, however the process ends.
    shown.bind(f"\0sightline-replica-{instance}")
    return shown


class ActorProcess:
    """Base of the Ray actors: logging, build information, and TLS to the cluster's other processes."""

    def __init__(self, config: SightlineConfig, name: str, role: Role, *, numbered: str = "") -> None:
        configure_logging(name, config.cluster, numbered=numbered)
        describe_process(config, role)
        self._config, self._name = config, name
        self._tls = peer_tls(config.security)

    async def process_id(self) -> int:
        """For operators and tests."""
        return os.getpid()


class InnerProcess(ActorProcess):
    """A process that only the rest of the cluster reaches, at ``host``, with its own ``/metrics`` there."""

    def __init__(self, config: SightlineConfig, name: str, role: Role, host: str | None, *, numbered: str = "") -> None:
        super().__init__(config, name, role, numbered=numbered)
        if role == "controller":
            # With ten thousand cameras a full collection takes 0.4 of a heartbeat; reports are never part of cycles.
            gc.set_threshold(100_000, 50, 100)
        self._host = own_host(host)
        self._page = serve_metrics(self._host, config.cluster.metrics_ports, lambda: self._name, tls=self._tls)

    async def metrics_address(self) -> str:
        """``host:port`` of ``/metrics``, available while starting."""
        return self._page.address


def configure_logging(process: str, cluster: ClusterConfig, *, numbered: str = "") -> None:
    """Log records from INFO up to this process's log, in ``cluster.log_format``.

    ``numbered``: kind of a process whose name changes with every start, which would leave a file behind each time. It
    continues the first file of its kind that no running process writes.
    """
    redact_tracebacks()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if cluster.log_dir is not None:
        folder = Path(cluster.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{_free_number(folder, numbered) if numbered else process}.log"
        handlers.append(RotatingFileHandler(file, maxBytes=10 * 2**20, backupCount=2, delay=True))
    for handler in handlers:
        handler.setFormatter(JsonFormatter(process) if cluster.log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[*handlers, CountingHandler()], force=True)


def _free_number(folder: Path, kind: str) -> str:
    for number in itertools.count():
        try:
            # Held until this process ends.
            lock = os.open(folder / f".{kind}-{number}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:
            # A file system without locks, full or read-only: it must not keep the process from starting.
            pass
        break
    return f"{kind}-{number}"


def config_digest(config: SightlineConfig) -> str:
    """Digest of the configuration, 12 hexadecimal digits, without passwords, which could otherwise be guessed from
    it."""
    # Without the secrets that this process has learnt: the digest must be the same in all processes.
    shown = redact_log(config.model_dump_json(), KnownSecrets())
    return hashlib.blake2b(shown.encode(), digest_size=6).hexdigest()


def describe_process(config: SightlineConfig, role: Role) -> None:
    """Set ``sightline_build_info`` and create this process's zero series."""
    metrics.build_info.clear()
    metrics.build_info.labels(__version__, config.engine, config.model.name, config_digest(config)).set(1)
    create_zero_series(role, sinks=[sink.name for sink in config.alerts.sinks])
