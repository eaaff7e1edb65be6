"""Local copy of all ``Camera`` resources: list once, then watch, on its own thread."""

import logging
import random
import threading
import time
from collections.abc import Callable

from cluster import metrics
from cluster.errors import SightlineError
from cluster.kubernetes.api import ExpiredError, KubernetesApi
from cluster.kubernetes.resource import CameraResource

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
HASTY_S = 1.0
"""A watch that ends sooner than this without an event counts as a failure, which delays the reconnect."""


class CameraWatch:
    """Resumes broken connections from the last version seen, and lists again when that has expired.

    Args:
        on_change: called on the thread when a resource was added, deleted, or its spec changed.
        wait_s: first and longest delay between attempts; doubled each time, with up to half of it random.
    """

    def __init__(
        self,
        source: KubernetesApi,
        on_change: Callable[[], None],
        *,
        wait_s: tuple[float, float] = (FIRST_WAIT_S, LONGEST_WAIT_S),
    ) -> None:
        self._source = source
        self._on_change = on_change
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._resources: dict[str, CameraResource] = {}
        self._listed = False
        self._version: str | None = None
        self._failures = 0
        self._metrics = metrics.WatchMetrics()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="camera resources", daemon=True)
        self.trouble = ""
        """Why it is currently not watching; empty if it is."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Stop; false if the thread did not end in time."""
        self._stopped.set()
        self._source.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def snapshot(self) -> dict[str, CameraResource] | None:
        """All resources by name; ``None`` before the first list."""
        with self._lock:
            return dict(self._resources) if self._listed else None

    def record_write(self, before: CameraResource, after: CameraResource) -> None:
        """Replace ``before`` by ``after``, written by this process, unless the watch already has a newer one."""
        with self._lock:
            known = self._resources.get(before.name)
            if known is not None and (known.uid, known.version) == (before.uid, before.version):
                self._resources[before.name] = after

    def _run(self) -> None:
        while not self._stopped.is_set():
            began_s = time.monotonic()
            end: metrics.WatchEnd = "ended"
            try:
                active = self._once()
            except ExpiredError as error:
                log.info("listing camera resources again: %s", error)
                self._version, active, end = None, False, "expired"
            except SightlineError as error:
                if not self._stopped.is_set() and self.trouble != str(error):
                    log.warning("cannot watch camera resources: %s", error)
                self.trouble, active, end = str(error), False, "broken"
            except Exception:
                log.exception("listing camera resources again")
                self._version, active, end = None, False, "failed"
            if not self._stopped.is_set():
                self._metrics.restarted(end)
            hasty = not active and time.monotonic() - began_s < HASTY_S
            self._failures = self._failures + 1 if hasty else 0
            if hasty:
                first, longest = self._wait_s
                wait_s = min(longest, first * 2.0 ** min(self._failures - 1, 16))
                self._stopped.wait(wait_s * random.uniform(0.5, 1.0))

    def _once(self) -> bool:
        """List if needed, and watch until the watch ends; returns whether the server was heard."""
        active = False
        if self._version is None:
            resources, version = self._source.list()
            self._metrics.listed()
            self._replace(resources)
            self._version, active = version, self._failures == 0
        for kind, what in self._source.watch(self._version):
            active, self._failures, self.trouble = True, 0, ""
            self._metrics.server_responded()
            if isinstance(what, str):
                self._version = what
            else:
                self._take(kind, what)
                self._version = what.version
            if self._stopped.is_set():
                break
        else:
            self.trouble = ""
            self._metrics.server_responded()
        return active

    def _replace(self, resources: list[CameraResource]) -> None:
        fresh = {resource.name: resource for resource in resources}
        with self._lock:
            before = {name: resource.asked for name, resource in self._resources.items()}
            changed = not self._listed or before != {name: resource.asked for name, resource in fresh.items()}
            self._resources, self._listed = fresh, True
        if changed:
            self._on_change()

    def _take(self, kind: str, resource: CameraResource) -> None:
        with self._lock:
            known = self._resources.get(resource.name)
            if kind == "DELETED":
                self._resources.pop(resource.name, None)
                changed = known is not None
            else:
                self._resources[resource.name] = resource
                changed = known is None or known.asked != resource.asked
        if changed:
            self._on_change()
