"""Brings the cluster's cameras to what the ``Camera`` resources ask for, and tells each resource what became of it.

Driven by levels, not by events: every pass compares all resources with all cameras, so that it does not matter what was
missed, in which order things came, or what somebody else did meanwhile. A spec that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from cluster import metrics
from cluster.config.cluster import KubernetesConfig
from cluster.control.cameras.managed import KUBERNETES, ManagedCamera, check_manager, written_keys
from cluster.errors import (
    CapacityError,
    ConfigError,
    ManagedElsewhereError,
    SightlineError,
    UnavailableError,
    UnknownCameraError,
)
from cluster.kubernetes.api import ChangedError
from cluster.kubernetes.keys import in_resource_words
from cluster.kubernetes.resource import ACCEPTED, CameraResource, Outcome, status_of, worth_writing
from cluster.types import CameraStatus

log = logging.getLogger(__name__)

T = TypeVar("T")

AT_ONCE = 16
"""Cameras that are changed side by side: to remove one may take some heartbeats."""

CALLS = 4
"""Calls to the API server side by side."""

ATTEMPTS = 4
"""Times that a status is written before the next round takes it up again."""

_STATES: dict[str, metrics.ResourceState] = {
    "Accepted": "accepted",
    "Conflict": "conflict",
    "NoRoom": "no_room",
    "Invalid": "invalid",
}
"""By the reason of what became of a spec."""


class CameraCluster(Protocol):
    """The controller. Raises what the gateway's ``Cameras`` service raises."""

    async def managed(self) -> Sequence[ManagedCamera]: ...

    async def statuses(self) -> Sequence[CameraStatus]: ...

    async def add(self, camera: ManagedCamera, *, takeover: bool) -> None: ...

    async def update(self, camera: ManagedCamera, *, takeover: bool) -> None: ...

    async def remove(self, name: str) -> None:
        """Of this manager only."""
        ...


class Resources(Protocol):
    """What is known of the resources: :class:`~cluster.kubernetes.watch.CameraWatch`."""

    def snapshot(self) -> Mapping[str, CameraResource] | None: ...

    def record_write(self, before: CameraResource, after: CameraResource) -> None: ...


class Api(Protocol):
    """See :class:`~cluster.kubernetes.api.KubernetesApi`."""

    def secret(self, name: str) -> Mapping[str, str]: ...

    def get(self, name: str) -> CameraResource: ...

    def write_status(self, resource: CameraResource, status: Mapping[str, Any]) -> CameraResource: ...


@dataclass(frozen=True, slots=True)
class _Done:
    """What was done for what was ``asked``."""

    asked: tuple[str, int, bool]
    outcome: Outcome


class Reconciler:
    """See the module. One event loop runs it; ``changed`` may be called from any thread of it through the loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: KubernetesConfig,
        cluster: CameraCluster,
        resources: Resources,
        api: Api,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._resources = resources
        self._api = api
        self._clock = clock
        self._wake = asyncio.Event()
        self._done: dict[str, _Done] = {}
        self._written_s: dict[str, tuple[str, float]] = {}
        self._passed_s = -math.inf
        self._told_s = -math.inf
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="kubernetes")

    def changed(self) -> None:
        """A resource changed: do not wait for the next pass."""
        self._wake.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self.run_once()
            except UnavailableError as error:
                log.warning("cameras are not brought in line: %s", error)
                self._passed_s = -math.inf
            except Exception:
                # A defect met with one resource must not be the end of all others.
                log.exception("cameras are not brought in line")
                await asyncio.sleep(self._config.status_s)
            # Not wait_for, which may swallow a cancellation that comes together with what it waits for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.status_s):
                    await self._wake.wait()

    async def run_once(self) -> None:
        """A pass if one is due, and the statuses that are due.

        Raises:
            UnavailableError: the controller is not there; nothing is lost, the next turn goes on.
        """
        now_s = self._clock()
        if self._wake.is_set() or now_s - self._passed_s >= self._config.resync_s:
            self._wake.clear()
            self._passed_s = now_s
            await self.reconcile()
        if now_s - self._told_s >= self._config.status_s:
            self._told_s = now_s
            await self.write_statuses()

    # -- resources to cameras ---------------------------------------------------------------------
    async def reconcile(self) -> None:
        """One pass over everything. Raises ``UnavailableError`` once everything else is done."""
        resources = self._resources.snapshot()
        if resources is None:
            return
        began_s = self._clock()
        try:
            errors = await self._compare(resources)
        except Exception as error:
            self._finish_pass(resources, began_s, [error])
            raise
        self._finish_pass(resources, began_s, errors)
        if errors:
            raise UnavailableError(f"not every camera could be brought in line: {errors[0]}")

    async def _compare(self, resources: Mapping[str, CameraResource]) -> list[BaseException]:
        """What stood in the way of single cameras."""
        cameras = {camera.entry.name: camera for camera in await self._cluster.managed()}
        gone = [name for name, camera in cameras.items() if camera.manager == KUBERNETES and name not in resources]
        self._done = {name: done for name, done in self._done.items() if name in resources}
        self._written_s = {name: told for name, told in self._written_s.items() if name in resources}
        secrets = _Secrets(self._api, self._in_thread)
        limit = asyncio.Semaphore(AT_ONCE)

        async def bounded(work: Awaitable[None]) -> None:
            async with limit:
                await work

        jobs = [self._remove(name) for name in gone]
        jobs += [self._reconcile_camera(resource, cameras.get(name), secrets) for name, resource in resources.items()]
        results = await asyncio.gather(*map(bounded, jobs), return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        for error in errors:
            if not isinstance(error, UnavailableError):
                log.error("a camera could not be brought in line", exc_info=error)
        return errors

    def _finish_pass(
        self, resources: Mapping[str, CameraResource], began_s: float, errors: Sequence[BaseException]
    ) -> None:
        away = all(isinstance(error, UnavailableError) for error in errors)
        result = "done" if not errors else "unavailable" if away else "failed"
        metrics.reconciler_pass_seconds.labels(result).observe(self._clock() - began_s)
        metrics.show_resources(map(self._state, resources.values()))

    def _state(self, resource: CameraResource) -> metrics.ResourceState:
        done = self._done.get(resource.name)
        if done is None or done.asked != resource.asked:
            return "waiting"
        return _STATES[done.outcome.reason]

    async def _remove(self, name: str) -> None:
        try:
            await self._cluster.remove(name)
            metrics.reconciler_changes.labels("removed").inc()
            log.info("camera %s: its resource is gone, it is removed", name)
        except (UnknownCameraError, ManagedElsewhereError):
            # Somebody was faster.
            return

    async def _reconcile_camera(
        self, resource: CameraResource, camera: ManagedCamera | None, secrets: _Secrets
    ) -> None:
        try:
            outcome = await self._apply(resource, camera, secrets)
        except ManagedElsewhereError as error:
            outcome = Outcome("False", "Conflict", str(error), conflict=str(error))
        except CapacityError as error:
            outcome = Outcome("False", "NoRoom", str(error))
        except (ConfigError, UnknownCameraError) as error:
            outcome = Outcome("False", "Invalid", in_resource_words(error))
        known = self._done.get(resource.name)
        if outcome.accepted != "True" and (known is None or known.outcome != outcome):
            log.warning("camera resource %s is not accepted: %s", resource.name, outcome.message)
        self._done[resource.name] = _Done(resource.asked, outcome)

    async def _apply(self, resource: CameraResource, camera: ManagedCamera | None, secrets: _Secrets) -> Outcome:
        credentials = resource.credentials
        entry = resource.entry(None if credentials is None else await secrets.get(credentials.secret))
        wanted = ManagedCamera(entry=entry, manager=KUBERNETES, uid=resource.uid)
        if camera is not None:
            check_manager(resource.name, camera.manager, KUBERNETES, takeover=resource.takeover)
            if camera.manager == KUBERNETES and camera.uid not in ("", resource.uid):
                # Deleted and made anew: what the old one saw is not the new one's to remember.
                await self._remove(resource.name)
                camera = None
        if camera is None:
            await self._cluster.add(wanted, takeover=resource.takeover)
            metrics.reconciler_changes.labels("added").inc()
            log.info("camera %s: added for its resource", resource.name)
        elif (camera.manager, written_keys(camera.entry)) != (KUBERNETES, written_keys(entry)):
            await self._cluster.update(wanted, takeover=resource.takeover)
            metrics.reconciler_changes.labels("changed").inc()
            log.info("camera %s: changed for its resource", resource.name)
        return ACCEPTED

    # -- cameras to statuses ----------------------------------------------------------------------
    async def write_statuses(self) -> None:
        """Write the statuses that changed and are due, those told longest ago first. Raises ``UnavailableError`` when
        the controller is not there."""
        resources = self._resources.snapshot()
        if not resources:
            return
        cameras = {status.name: status for status in await self._cluster.statuses()}
        due: list[tuple[float, CameraResource]] = []
        for name, resource in resources.items():
            done = self._done.get(name)
            if done is None or done.asked != resource.asked:
                continue
            wait_s = self._wait_s(resource, self._status(resource, cameras.get(name)))
            uid, written_s = self._written_s.get(name, ("", -math.inf))
            told_s = written_s if uid == resource.uid else -math.inf
            if self._clock() - told_s >= wait_s:
                due.append((told_s, resource))
        due.sort(key=lambda each: each[0])
        room = max(1, math.ceil(self._config.status_per_s * self._config.status_s))
        wanted = iter([resource for _, resource in due[:room]])

        async def write() -> None:
            for resource in wanted:
                if not await self._write(resource, cameras.get(resource.name)):
                    # With a server that does not answer, all of them would take their timeout.
                    return

        await asyncio.gather(*(write() for _ in range(CALLS)))

    def _wait_s(self, resource: CameraResource, status: Mapping[str, Any]) -> float:
        kind = worth_writing(resource.status, status)
        return {"nothing": math.inf, "later": self._config.status_refresh_s, "soon": self._config.status_s}[kind]

    def _status(self, resource: CameraResource, camera: CameraStatus | None) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return status_of(resource, self._done[resource.name].outcome, camera, now, resource.status)

    async def _write(self, resource: CameraResource, camera: CameraStatus | None) -> bool:
        """False when the server is not there."""
        asked, name = resource.asked, resource.name
        for _ in range(ATTEMPTS):
            status = self._status(resource, camera)
            self._written_s[name] = resource.uid, self._clock()
            try:
                after = await self._in_thread(self._api.write_status, resource, status)
            except ChangedError:
                metrics.reconciler_status_writes.labels("conflict").inc()
                try:
                    resource = await self._in_thread(self._api.get, name)
                except SightlineError:
                    return True
                if resource.asked != asked:
                    # What was done was done for another spec: the next pass has something else to say.
                    return True
                continue
            except UnknownCameraError:
                metrics.reconciler_status_writes.labels("gone").inc()
                return True
            except SightlineError as error:
                metrics.reconciler_status_writes.labels("failed").inc()
                log.warning("the status of camera resource %s is not written: %s", name, error)
                return False
            metrics.reconciler_status_writes.labels("written").inc()
            self._resources.record_write(resource, after)
            return True
        return True

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)


class _Secrets:
    """Secrets as of one pass: each is read once, however many cameras name it."""

    def __init__(self, api: Api, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._api = api
        self._in_thread = in_thread
        self._read: dict[str, asyncio.Future[Mapping[str, str]]] = {}

    async def get(self, name: str) -> Mapping[str, str]:
        """Raises as :meth:`KubernetesApi.secret`."""
        if name not in self._read:
            self._read[name] = asyncio.ensure_future(self._in_thread(self._api.secret, name))
        return await self._read[name]
