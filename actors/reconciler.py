"""The reconciler actor: runs one ``Reconciler`` between Kubernetes ``Camera`` resources and the controller."""

import asyncio
import logging

from actors.remote import RECONCILER, REMOTE_CONTROLLER
from actors.startup import InnerProcess, run_task
from cluster.config import SightlineConfig
from cluster.errors import SightlineError
from cluster.kubernetes.api import KubernetesApi
from cluster.kubernetes.reconciler import Reconciler
from cluster.kubernetes.watch import CameraWatch

log = logging.getLogger(__name__)

STOP_S = 2.0
"""Seconds that a call in progress gets when stopping."""


class ReconcilerActor(InnerProcess):
    """Ray actor, named ``reconciler``. Stateless: a restart reconciles everything again."""

    def __init__(self, config: SightlineConfig, host: str | None) -> None:
        super().__init__(config, RECONCILER, "reconciler", host)
        self._loop = asyncio.get_running_loop()
        self._watch: CameraWatch | None = None
        self._reconciler: Reconciler | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = run_task(self._start(), told=SightlineError)

    async def ready(self) -> bool:
        """Wait until the watch has started; the API server may still be unavailable. Raises ``ConfigError`` without
        server address or identity."""
        return await asyncio.shield(self._started)

    async def stop(self) -> None:
        """Stop watching; the cameras stay as they are."""
        self._started.cancel()
        await asyncio.to_thread(self._page.close)
        if self._task is None or self._watch is None or self._reconciler is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task], timeout=STOP_S)
        self._reconciler.close()
        await asyncio.to_thread(self._watch.stop)

    async def _start(self) -> bool:
        api = await asyncio.to_thread(KubernetesApi, self._config.kubernetes)
        self._watch = CameraWatch(api, self._wake)
        self._reconciler = Reconciler(self._config.kubernetes, REMOTE_CONTROLLER, self._watch, api)
        self._watch.start()
        self._task = run_task(self._reconciler.run())
        log.info("watching Camera resources of namespace %s", api.namespace)
        return True

    def _wake(self) -> None:
        if self._reconciler is not None:
            self._loop.call_soon_threadsafe(self._reconciler.changed)
