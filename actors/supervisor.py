"""Keeps the processes of a cluster running that Ray Serve owns instead of a driver, as with KubeRay."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable

import ray

from actors.preflight import cautions, check_settings
from actors.processes import Watchdog, wanted_processes
from actors.remote import ALERTING, RayTable, await_reply, find_actor, gateway_names, get_actor
from actors.startup import configure_logging
from cluster.config import SightlineConfig
from cluster.errors import SightlineError, UnavailableError, first_line

log = logging.getLogger(__name__)

APPLICATION = "processes"
RUN_ID = "serve"
"""The same across upgrades, so that cameras added at run time stay."""
OWNER, PROCESS = "owner", "process/"
"""Keys in Ray's key-value store: the supervisor that owns the processes, and the digest of each one's configuration."""
POLL_S = 2.0
STALLED_S = 60.0
"""Seconds without a pass over all processes after which the supervisor reports itself unhealthy."""


def public_processes(config: SightlineConfig) -> list[str]:
    """Names of the processes that must listen before the cluster is ready."""
    return [*gateway_names(config.cluster.gateways), *([ALERTING] if config.alerts.enabled else [])]


def check_listening(config: SightlineConfig, listening: set[str]) -> None:
    """Report processes that missed the start timeout. Raises ``UnavailableError``, unless only some of several gateways
    are missing: without their node, the others serve."""
    missing = [name for name in public_processes(config) if name not in listening]
    waited = f"{', '.join(missing)} did not listen within {config.cluster.start_timeout_s:g} s"
    if ALERTING in missing or not listening.intersection(gateway_names(config.cluster.gateways)):
        raise UnavailableError(
            f"{waited}; is there a node with the Ray resources cluster.placement.control and "
            "cluster.placement.gateway? See the processes' logs, or raise cluster.start_timeout_s"
        )
    log.warning("%s; is there a node for each with the Ray resource cluster.placement.gateway?", waited)


class Supervisor:
    """Ray Serve deployment with one replica. Its processes are detached: they outlive it, and its successor finds them.

    A process whose configuration changed is restarted; one that has ended for good (its node left) is started again;
    all end with the application.
    """

    async def __init__(self, load: Callable[[], SightlineConfig]) -> None:  # type: ignore[misc]  # Serve awaits it
        config = load()
        configure_logging("supervisor", config.cluster)
        await asyncio.to_thread(check_settings, config)
        for sentence in cautions(config):
            log.warning("%s", sentence)
        self._config = config
        self._me, self._table = uuid.uuid4().hex.encode(), RayTable("sightline-processes")
        self._watchdog = Watchdog(config.cluster.stall_timeout_s)
        # From here on other supervisors change nothing.
        await asyncio.to_thread(self._table.write, {OWNER: self._me})
        self._looked, self._ending = asyncio.Event(), asyncio.Event()
        self._looked_s = time.monotonic()
        self._listening: set[str] = set()
        self._task = asyncio.create_task(self._supervise())
        try:
            async with asyncio.timeout(config.cluster.start_timeout_s):
                await self._until_ready()
        except TimeoutError:
            check_listening(config, self._listening)

    async def check_health(self) -> None:
        """Raises ``UnavailableError`` when passes over the processes are overdue."""
        silent_s = time.monotonic() - self._looked_s
        if silent_s > STALLED_S:
            raise UnavailableError(f"the cluster's processes have not been checked for {silent_s:.0f} s")

    async def __call__(self) -> str:
        """Required by Serve; nothing calls it."""
        return APPLICATION

    async def __del__(self) -> None:
        """Awaited by Serve. Ends every process if the application is deleted, not if this replica is replaced."""
        self._ending.set()
        # A pass in progress would restart what is ended here.
        await self._task
        if await asyncio.to_thread(_application_ends):
            log.info("the application ends: stopping every process")
            await asyncio.to_thread(self._end_all)

    async def _until_ready(self) -> None:
        """Wait until the public endpoints listen; raises errors of a process that cannot start."""
        await self._looked.wait()
        await asyncio.gather(*(self._until_listens(name) for name in public_processes(self._config)))

    async def _until_listens(self, name: str) -> None:
        while True:
            try:
                handle = get_actor(name, f"{name} has not been started yet")
                await await_reply(handle.ready.remote(), timeout_s=POLL_S)
                self._listening.add(name)
                return
            except UnavailableError:
                await asyncio.sleep(POLL_S / 4)
            except SightlineError:
                # A retry cannot help.
                await asyncio.to_thread(self._end, {name: False})
                raise

    async def _supervise(self) -> None:
        while not self._ending.is_set():
            try:
                await asyncio.to_thread(self._reconcile)
                self._looked_s = time.monotonic()
                self._looked.set()
            except Exception as error:  # Never give up: nobody else starts them.
                log.warning("could not reconcile the processes: %s", first_line(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._ending.wait()

    def _reconcile(self) -> None:
        """Start missing processes; end those no longer wanted or with another configuration."""
        if self._table.get(OWNER) != self._me:
            return
        started = self._started()
        wanted = wanted_processes(self._config, RUN_ID, None, started)
        ending = dict.fromkeys(started - wanted.keys(), True)
        for name, process in wanted.items():
            if find_actor(name) is not None and self._table.get(PROCESS + name) != process.digest.encode():
                ending[name] = not process.keeps_state
        self._end(ending)
        for name, process in wanted.items():
            if find_actor(name) is None:
                log.info("starting %s", name)
                with contextlib.suppress(ValueError):
                    process.start(self._config.cluster.placement, detached=True)
                    self._table.write({PROCESS + name: process.digest.encode()})
        self._watchdog.restart_hung(wanted)

    def _started(self) -> set[str]:
        """Names of the started processes."""
        return {key.removeprefix(PROCESS) for key in self._table.keys(PROCESS)}

    def _end_all(self) -> None:
        if self._table.get(OWNER) == self._me:
            self._end(dict.fromkeys(self._started(), True))
            self._table.write({}, self._table.keys(""))

    def _end(self, names: dict[str, bool]) -> None:
        """End processes by name; the value says whether they also delete their state. Raises ``TimeoutError``: a name
        was not released."""
        handles = {name: handle for name in names if (handle := find_actor(name)) is not None}
        if handles:
            log.info("ending %s", ", ".join(sorted(handles)))
        stopping = [handle.stop.remote() for name, handle in handles.items() if names[name]]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=self._config.cluster.stop_timeout_s)
        for handle in handles.values():
            ray.kill(handle)
        deadline = time.monotonic() + self._config.cluster.stop_timeout_s
        while left := [name for name in handles if find_actor(name) is not None]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(left)} did not end")
            time.sleep(0.05)
        self._table.write({}, [PROCESS + name for name in names])


def _application_ends() -> bool:
    """Whether Serve deletes the application rather than replacing this replica."""
    from ray import serve

    name = serve.get_replica_context().app_name
    application = serve.status().applications.get(name)
    return application is None or application.status == "DELETING"
