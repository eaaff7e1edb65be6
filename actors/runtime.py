"""Runs a whole cluster from one configuration: ``with Cluster(config) as cluster: ...``."""

import atexit
import contextlib
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import RayError

from actors.alerting import private_folder
from actors.controller import Readiness
from actors.preflight import preflight
from actors.processes import Process, Watchdog, processes, tiers, wanted_processes
from actors.remote import ALERTING, CONTROLLER, RECONCILER, await_reply_blocking, find_actor, gateway_names, short_tier
from actors.session import RaySession
from actors.startup import Addresses
from cluster.config import SightlineConfig
from cluster.control.cameras.table import lock_state
from cluster.control.decoders import decoder_names
from cluster.errors import ConfigError, SightlineError, UnavailableError, first_line
from cluster.redaction import redact
from cluster.security.private_files import FolderLock
from cluster.types import CameraStatus

log = logging.getLogger(__name__)

APPLICATION = "sightline"
POLL_S = 0.05
FOLLOW_S = 1.0
"""Seconds between comparisons of the running with the wanted processes."""
ANSWER_S = 1.0
"""Seconds within which a started process answers."""


class Cluster:
    """Starts every process, waits until all are ready, and stops them all on any exit. ``on_phase`` is called with each
    phase of starting."""

    def __init__(self, config: SightlineConfig, *, on_phase: Callable[[str], None] = log.info) -> None:
        self._config = config
        self._on_phase = on_phase
        self._session = RaySession(config.cluster.ray_address)
        self._run_id = uuid.uuid4().hex[:12]
        self._actors: dict[str, Any] = {}
        self._addresses: list[Addresses] = []
        self._state: FolderLock | None = None
        self._serving = False
        self._stopped = False
        self._ending = threading.Event()
        self._following: threading.Thread | None = None
        self.parts: dict[str, str] = {}
        """State by name: of each process whether it runs; of engines, memories and the disk the problem, or empty. Has
        no entries until every process has been seen."""
        self._replicas: dict[str, int] = {}
        self._troubles: dict[str, str] = {}

    @property
    def gateway_address(self) -> str:
        """``host:port`` of the first gateway's gRPC."""
        return self.gateways[0].rpc

    @property
    def metrics_address(self) -> str:
        """``host:port`` of the first gateway's HTTP server, with the ``/metrics`` of all processes."""
        return self.gateways[0].metrics

    @property
    def gateways(self) -> list[Addresses]:
        """Addresses of all gateways at the start; the same for gateways on nodes of their own."""
        if not self._addresses:
            raise SightlineError("the cluster is not running; call start() first")
        return self._addresses

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start, and wait until every process is ready. Raises, leaving nothing running, ``ConfigError``: wrong model,
        port or address; ``SightlineError``: a process did not start within ``cluster.start_timeout_s``."""
        config = preflight(self._config)
        atexit.register(self.stop)
        try:
            config = self._with_state(config)
            self._on_phase("starting ray")
            self._session.start()
            self._start_processes(config)
        except BaseException as error:
            self.stop()
            if isinstance(error, RayError):
                raise SightlineError(f"the cluster did not start: {first_line(error)}") from None
            raise

    def readiness(self) -> Readiness:
        """Ready decoders and replicas, with their addresses and process ids."""
        readiness: Readiness = await_reply_blocking(self._actors[CONTROLLER].readiness.remote())
        return readiness

    def cameras(self) -> list[CameraStatus]:
        """Status of all cameras, sorted by name; waits until a restarted controller knows them."""
        statuses: list[CameraStatus] = await_reply_blocking(self._actors[CONTROLLER].list_cameras.remote())
        return statuses

    def failure(self) -> str | None:
        """Names an essential process that has died; ``None`` while the cluster runs. Call it often."""
        return self._session.failure()

    def stop(self) -> None:
        """Stop everything; idempotent, and safe after an exception or Ctrl-C."""
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        timeout_s = self._config.cluster.stop_timeout_s
        self._ending.set()
        if ray.is_initialized() and self._session.failure() is None:
            if self._following is not None:
                self._following.join(timeout_s)
            self._ask_to_stop(timeout_s)
            if not self._session.private:
                self._remove_actors()
        self._session.stop(timeout_s)
        if self._session.private:
            # Alerting deletes it unless it was killed.
            shutil.rmtree(private_folder(self._run_id), ignore_errors=True)
        if self._state is not None:
            self._state.release()

    # -- starting -------------------------------------------------------------------------------
    def _with_state(self, config: SightlineConfig) -> SightlineConfig:
        """Lock the state folder; incidents and clips go there unless they have a folder of their own."""
        folder = config.cluster.state_dir
        if folder is None:
            return config
        if self._session.private:
            self._state = lock_state(Path(folder))
        if config.alerts.folder is not None:
            return config
        alerts = config.alerts.model_copy(update={"folder": str(Path(folder, "alerts"))})
        return config.model_copy(update={"alerts": alerts})

    def _start_processes(self, config: SightlineConfig) -> None:
        deadline = time.monotonic() + config.cluster.start_timeout_s
        host = self._session.host
        self._on_phase("starting controller")
        first, *others = processes(config, self._run_id, host)
        self._start_process(first, config)
        self._on_phase("starting serve")
        # First, because replicas take longest; the others start meanwhile.
        self._serve(config, host)
        self._on_phase("starting gateway")
        for process in (*others, *tiers(config, host)):
            self._start_process(process, config)
        try:
            self._addresses = [
                self._reply(self._actors[name].ready.remote(), deadline)
                for name in gateway_names(config.cluster.gateways)
            ]
            for name in self._actors.keys() & {ALERTING, RECONCILER}:
                self._reply(self._actors[name].ready.remote(), deadline)
            self._on_phase("starting decoders and replicas")
            self._wait_until_ready(config, deadline)
        except UnavailableError as error:
            known = "".join(f"; {each}" for each in self._last_words())
            logs = config.cluster.log_dir or self._session.log_dir
            raise UnavailableError(f"{error}{known}; the logs are in {logs}") from None
        self._following = threading.Thread(target=self._follow_processes, args=(config, host), daemon=True)
        self._following.start()

    def _reply(self, call: Any, deadline: float) -> Any:
        """Reply of a process that starts; raises as :func:`await_reply_blocking`, and ``SightlineError``: Ray died."""
        while not ray.wait([call], timeout=ANSWER_S, fetch_local=False)[0]:
            if (failure := self.failure()) is not None:
                raise SightlineError(f"the cluster did not start: {failure}; the logs are in {self._session.log_dir}")
            if time.monotonic() > deadline:
                limit_s = self._config.cluster.start_timeout_s
                raise UnavailableError(f"a process did not start within {limit_s:g} s (cluster.start_timeout_s)")
        return await_reply_blocking(call)

    def _start_process(self, process: Process, config: SightlineConfig) -> None:
        try:
            self._actors[process.name] = process.start(config.cluster.placement)
        except ValueError:
            raise ConfigError(
                f"a Sightline cluster already runs at Ray address {self._config.cluster.ray_address!r}; stop it first"
            ) from None

    def _follow_processes(self, config: SightlineConfig, host: str | None) -> None:
        """Start processes that have ended for good, since Ray does not restart one that fails while starting; start and
        stop decoders as the controller decides."""
        most = set(decoder_names(config.cluster.max_decoders or 0))
        watchdog = Watchdog(config.cluster.stall_timeout_s)
        while not self._ending.wait(FOLLOW_S):
            try:
                wanted = wanted_processes(config, self._run_id, host, self._actors)
                for name, process in wanted.items():
                    if find_actor(name) is None:
                        if name in self._actors:
                            log.warning("%s has ended; starting it again", name)
                        self._start_process(process, config)
                for name in (self._actors.keys() & most) - wanted.keys():
                    # It has no cameras left.
                    ray.kill(self._actors.pop(name))
                watchdog.restart_hung(wanted)
                self._update_parts(watchdog.running())
            except Exception as error:  # Never give up: nobody else starts them.
                if not self._ending.is_set():
                    log.warning("could not reconcile the processes: %s", error)

    def _update_parts(self, running: dict[str, int]) -> None:
        """Update :attr:`parts` from the watchdog, the controller and alerting; without an answer, entries stay."""
        with contextlib.suppress(UnavailableError):
            controller = self._actors[CONTROLLER]
            readiness = await_reply_blocking(controller.readiness.remote(), timeout_s=FOLLOW_S)
            # A replica that died may return under another name.
            there = {name: info.pid for name, info in readiness.replicas.items()}
            self._replicas = dict.fromkeys(self._replicas, 0) | there
            for each in await_reply_blocking(controller.list_replicas.remote(), timeout_s=FOLLOW_S):
                self._troubles |= {f"engine of {each.name}": each.trouble, f"memory of {each.name}": each.memory}
            if ALERTING in self._actors:
                asked = self._actors[ALERTING].disk_trouble.remote()
                self._troubles["disk of incidents"] = await_reply_blocking(asked, timeout_s=FOLLOW_S)
        if self.parts or all(running.values()):
            pids = {short_tier(name): pid for name, pid in (running | self._replicas).items()}
            lives = {name: f"runs (process {pid})" if pid else "died" for name, pid in pids.items()}
            self.parts = lives | {name: redact(text) for name, text in self._troubles.items()}

    def _serve(self, config: SightlineConfig, host: str | None) -> None:
        # Imported late: Serve reads its flags from the environment on import.
        from ray import serve
        from ray.serve.api import RunTarget

        from actors.replica import replica_application

        # Importing it has set the level to INFO, with a handler that writes to the caller's terminal.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        self._serving = True
        target = RunTarget(replica_application(config, host), name=APPLICATION, route_prefix=None)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def _wait_until_ready(self, config: SightlineConfig, deadline: float) -> None:
        wanted = {"decoder": config.cluster.decoders, "replica": config.cluster.replicas}
        while True:
            readiness: Readiness = self._reply(self._actors[CONTROLLER].readiness.remote(), deadline)
            if readiness.failure is not None:
                raise readiness.failure
            ready = {"decoder": len(readiness.decoders), "replica": len(readiness.replicas)}
            if all(ready[kind] >= wanted[kind] for kind in wanted):
                return
            if time.monotonic() > deadline:
                missing = ", ".join(f"{ready[kind]} of {wanted[kind]} {kind}s" for kind in wanted)
                raise UnavailableError(
                    f"only {missing} became ready within {config.cluster.start_timeout_s:g} s "
                    "(cluster.start_timeout_s, for a model that takes longer to load)"
                )
            time.sleep(POLL_S)

    def _last_words(self) -> Iterator[str]:
        """The last exception of each failed process, and Serve's messages about the replicas."""
        for call, name in self._answered().items():
            try:
                ray.get(call)
            except RayError as error:
                yield f"{name}: {_last_line(error)}"
        if self._serving:
            from ray import serve

            # Without an answer from Serve, the exceptions above must do.
            with contextlib.suppress(RayError):
                for name, deployment in serve.status().applications[APPLICATION].deployments.items():
                    if deployment.message.strip():
                        yield f"{name}: {_last_line(deployment.message)}"

    def _answered(self) -> dict[Any, str]:
        """Completed calls with the names of their processes, which answered or failed; not those still starting."""
        calls = {actor.process_id.remote(): name for name, actor in self._actors.items()}
        answered = ray.wait([*calls], num_returns=len(calls), timeout=ANSWER_S)[0] if calls else []
        return {call: calls[call] for call in answered}

    # -- stopping -------------------------------------------------------------------------------
    def _ask_to_stop(self, timeout_s: float) -> None:
        try:
            # A process that is still starting cannot answer yet, and has nothing to stop.
            there = self._actors if self._following is not None else set(self._answered().values())
            stopping = {actor.stop.remote(): name for name, actor in reversed(self._actors.items()) if name in there}
            late = ray.wait([*stopping], num_returns=len(stopping), timeout=timeout_s)[1] if stopping else []
            if late:
                names = ", ".join(sorted(stopping[each] for each in late))
                log.warning("%s did not stop within %g s: killed", names, timeout_s)
        except Exception as error:
            log.warning("could not ask the processes to stop: %s", error)

    def _remove_actors(self) -> None:
        with contextlib.suppress(Exception):
            if self._serving:
                from ray import serve

                serve.delete(APPLICATION)
        for actor in reversed(self._actors.values()):
            with contextlib.suppress(Exception):
                ray.kill(actor)


def _last_line(text: object) -> str:
    """Last line of a traceback: the exception."""
    return redact(str(text).strip().splitlines()[-1])
