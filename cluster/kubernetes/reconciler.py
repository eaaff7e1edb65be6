"""Reconciles the cluster's cameras with ``Camera`` resources, and writes each resource's status.

Level-triggered: every pass compares all resources with all cameras, so missed events, event order and concurrent
changes do not matter. An invalid spec changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

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
from cluster.gateway.directory import Directory
from cluster.kubernetes.api import ChangedError, KubernetesApi
from cluster.kubernetes.keys import in_resource_words
from cluster.kubernetes.resource import ACCEPTED, CameraResource, Outcome, status_of, worth_writing
from cluster.kubernetes.watch import CameraWatch
from cluster.types import CameraStatus

log = logging.getLogger(__name__)

T = TypeVar("T")
Secret = Callable[[str], Awaitable[Mapping[str, str]]]
"""Reads a Secret's values by its name; raises as :meth:`KubernetesApi.secret`."""

AT_ONCE = 16
"""Maximum concurrent camera changes: a removal may take several heartbeats."""

CALLS = 4
"""Maximum concurrent calls to the API server."""

ATTEMPTS = 4
"""Attempts to write a status before the next round retries it."""

_STATES: dict[str, metrics.ResourceState] = {
    "Accepted": "accepted",
    "Conflict": "conflict",
    "NoRoom": "no_room",
    "Invalid": "invalid",
}
"""Metric state by an outcome's reason."""


class _Done(NamedTuple):
    """Outcome of the last spec applied, ``asked``."""

    asked: tuple[str, int, bool]
    outcome: Outcome


class Reconciler:
    """See the module. Runs on one event loop; other threads call ``changed`` through the loop."""

    def __init__(
        self,
        config: KubernetesConfig,
        cluster: Directory,
        resources: CameraWatch,
        api: KubernetesApi,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._resources = resources
        self._api = api
        self._wake = asyncio.Event()
        self._done: dict[str, _Done] = {}
        self._written_s: dict[str, tuple[str, float]] = {}
        self._passed_s = -math.inf
        self._told_s = -math.inf
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="kubernetes")

    def changed(self) -> None:
        """Start a pass now, because a resource changed."""
        self._wake.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self) -> None:
        while True:
            try:
                await self.run_once()
            except UnavailableError as error:
                log.warning("cannot reconcile cameras: %s", error)
                self._passed_s = -math.inf
            except Exception:
                # A defect with one resource must not stop the others.
                log.exception("cannot reconcile cameras")
                await asyncio.sleep(self._config.status_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.status_s):
                    await self._wake.wait()

    async def run_once(self) -> None:
        """Run a pass and write statuses, if due. Raises ``UnavailableError``: the controller is unavailable; the next
        call continues."""
        now_s = time.monotonic()
        failed: UnavailableError | None = None
        if self._wake.is_set() or now_s - self._passed_s >= self._config.resync_s:
            self._wake.clear()
            self._passed_s = now_s
            try:
                await self.reconcile()
            except UnavailableError as error:
                # It may concern a single camera, permanently: still update the others' statuses.
                failed = error
        if now_s - self._told_s >= self._config.status_s:
            self._told_s = now_s
            await self.write_statuses()
        if failed is not None:
            raise failed

    # -- resources to cameras ---------------------------------------------------------------------
    async def reconcile(self) -> None:
        """Run one pass over everything. Raises ``UnavailableError``, after the rest is done, if cameras failed."""
        resources = self._resources.snapshot()
        if resources is None:
            return
        began_s = time.monotonic()
        try:
            errors = await self._compare(resources)
        except Exception as error:
            self._finish_pass(resources, began_s, [error])
            raise
        self._finish_pass(resources, began_s, errors)
        if errors:
            raise UnavailableError(f"not every camera could be reconciled: {errors[0]}")

    async def _compare(self, resources: Mapping[str, CameraResource]) -> list[BaseException]:
        """Apply all resources; returns the errors of single cameras."""
        cameras = {camera.entry.name: camera for camera in await self._cluster.managed_cameras(left_out=True)}
        gone = [name for name, camera in cameras.items() if camera.manager == KUBERNETES and name not in resources]
        self._done = {name: done for name, done in self._done.items() if name in resources}
        self._written_s = {name: told for name, told in self._written_s.items() if name in resources}
        read: dict[str, asyncio.Future[Mapping[str, str]]] = {}
        limit = asyncio.Semaphore(AT_ONCE)

        async def secret(name: str) -> Mapping[str, str]:
            # Read once per pass, however many cameras refer to it.
            if name not in read:
                read[name] = asyncio.ensure_future(self._in_thread(self._api.secret, name))
            return await read[name]

        async def bounded(work: Awaitable[None]) -> None:
            async with limit:
                await work

        jobs = [self._remove(name) for name in gone]
        jobs += [self._reconcile_camera(resource, cameras.get(name), secret) for name, resource in resources.items()]
        results = await asyncio.gather(*map(bounded, jobs), return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        for error in errors:
            if not isinstance(error, UnavailableError):
                log.error("a camera could not be reconciled", exc_info=error)
        return errors

    def _finish_pass(
        self, resources: Mapping[str, CameraResource], began_s: float, errors: Sequence[BaseException]
    ) -> None:
        away = all(isinstance(error, UnavailableError) for error in errors)
        result = "done" if not errors else "unavailable" if away else "failed"
        metrics.reconciler_pass_seconds.labels(result).observe(time.monotonic() - began_s)
        metrics.show_resources(map(self._state, resources.values()))

    def _state(self, resource: CameraResource) -> metrics.ResourceState:
        done = self._done.get(resource.name)
        if done is None or done.asked != resource.asked:
            return "waiting"
        return _STATES[done.outcome.reason]

    async def _remove(self, name: str) -> None:
        try:
            await self._cluster.remove_camera(name, KUBERNETES)
            metrics.reconciler_changes.labels("removed").inc()
            log.info("camera %s: removed with its resource", name)
        except (UnknownCameraError, ManagedElsewhereError):
            # Already removed or taken over.
            return

    async def _reconcile_camera(self, resource: CameraResource, camera: ManagedCamera | None, secret: Secret) -> None:
        try:
            outcome = await self._apply(resource, camera, secret)
        except ManagedElsewhereError as error:
            outcome = Outcome("False", "Conflict", str(error), conflict=str(error))
        except CapacityError as error:
            outcome = Outcome("False", "NoRoom", str(error))
        except (ConfigError, UnknownCameraError) as error:
            outcome = Outcome("False", "Invalid", in_resource_words(error))
        known = self._done.get(resource.name)
        if outcome.accepted != "True" and (known is None or known.outcome != outcome):
            log.warning("camera resource %s was rejected: %s", resource.name, outcome.message)
        self._done[resource.name] = _Done(resource.asked, outcome)

    async def _apply(self, resource: CameraResource, camera: ManagedCamera | None, secret: Secret) -> Outcome:
        credentials = resource.credentials
        entry = resource.entry(None if credentials is None else await secret(credentials.secret_name))
        wanted = ManagedCamera(entry=entry, manager=KUBERNETES, uid=resource.uid)
        if camera is not None:
            check_manager(resource.name, camera.manager, KUBERNETES, takeover=resource.takeover)
            if camera.manager == KUBERNETES and camera.uid not in ("", resource.uid):
                # Deleted and recreated: the new camera must not inherit the old one's memory.
                await self._remove(resource.name)
                camera = None
        if camera is None or camera.trouble:
            await self._cluster.add_camera(wanted, takeover=resource.takeover)
            metrics.reconciler_changes.labels("added").inc()
            log.info("camera %s: added for its resource", resource.name)
        elif (camera.manager, written_keys(camera.entry)) != (KUBERNETES, written_keys(entry)):
            await self._cluster.update_camera(wanted, takeover=resource.takeover)
            metrics.reconciler_changes.labels("changed").inc()
            log.info("camera %s: changed for its resource", resource.name)
        return ACCEPTED

    # -- cameras to statuses ----------------------------------------------------------------------
    async def write_statuses(self) -> None:
        """Write changed statuses that are due, oldest first. Raises ``UnavailableError``: the controller is
        unavailable."""
        resources = self._resources.snapshot()
        if not resources:
            return
        cameras = {status.name: status for status in await self._cluster.list_cameras()}
        due: list[tuple[float, CameraResource]] = []
        wait_s = {"later": self._config.status_refresh_s, "soon": self._config.status_s}
        for name, resource in resources.items():
            done = self._done.get(name)
            if done is None or done.asked != resource.asked:
                continue
            kind = worth_writing(resource.status, self._status(resource, cameras.get(name)))
            if kind == "nothing":
                continue
            uid, written_s = self._written_s.get(name, ("", -math.inf))
            told_s = written_s if uid == resource.uid else -math.inf
            if time.monotonic() - told_s >= wait_s[kind]:
                due.append((told_s, resource))
        due.sort(key=lambda each: each[0])
        most = max(1, math.ceil(self._config.status_per_s * self._config.status_s))
        wanted = iter([resource for _, resource in due[:most]])

        async def write() -> None:
            for resource in wanted:
                if not await self._write(resource, cameras.get(resource.name)):
                    # An unresponsive server would make every further write wait for its timeout.
                    return

        await asyncio.gather(*(write() for _ in range(CALLS)))

    def _status(self, resource: CameraResource, camera: CameraStatus | None) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return status_of(resource, self._done[resource.name].outcome, camera, now, resource.status)

    async def _write(self, resource: CameraResource, camera: CameraStatus | None) -> bool:
        """Write one status; false when the server is unavailable."""
        asked, name = resource.asked, resource.name
        for _ in range(ATTEMPTS):
            status = self._status(resource, camera)
            self._written_s[name] = resource.uid, time.monotonic()
            try:
                after = await self._in_thread(self._api.write_status, resource, status)
            except ChangedError:
                metrics.reconciler_status_writes.labels("conflict").inc()
                try:
                    resource = await self._in_thread(self._api.get, name)
                except SightlineError:
                    return True
                if resource.asked != asked:
                    # The outcome belongs to another spec: the next pass writes a new one.
                    return True
                continue
            except UnknownCameraError:
                metrics.reconciler_status_writes.labels("gone").inc()
                return True
            except SightlineError as error:
                metrics.reconciler_status_writes.labels("failed").inc()
                log.warning("cannot write the status of camera resource %s: %s", name, error)
                return False
            metrics.reconciler_status_writes.labels("written").inc()
            self._resources.record_write(resource, after)
            return True
        return True

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
