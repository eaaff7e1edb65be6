"""A reconciler that runs against a Kubernetes API server without Kubernetes, and waiting for what it does."""

import asyncio

from waiting import until_async

from cluster.config.cluster import KubernetesConfig
from cluster.kubernetes.api import KubernetesApi
from cluster.kubernetes.reconciler import Reconciler
from cluster.kubernetes.watch import CameraWatch

WAIT_S = 10.0


class Rig:
    """A reconciler that runs, with a clock that tests move."""

    def __init__(self, kube, cluster, **keys):
        keys = {"resync_s": 1, "status_s": 0.1, "status_refresh_s": 1000, "status_per_s": 1e6, **keys}
        self.kube, self.cluster = kube, cluster
        config = KubernetesConfig(enabled=True, kubeconfig=str(kube.kubeconfig), **keys)
        self.api = KubernetesApi(config)
        self.loop = asyncio.get_running_loop()
        self.watch = CameraWatch(self.api, self._changed, wait_s=(0.01, 0.05))
        self.reconciler = Reconciler(config, cluster, self.watch, self.api)

    def _changed(self):
        self.loop.call_soon_threadsafe(self.reconciler.changed)

    async def __aenter__(self):
        self.watch.start()
        self.task = asyncio.create_task(self.reconciler.run())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait([self.task])
        self.reconciler.close()
        assert await asyncio.to_thread(self.watch.stop)

    async def condition(self, name, kind, status, reason):
        """Wait for it; its sentence."""

        def found():
            condition = self.kube.condition(name, kind)
            return condition is not None and condition[:2] == (status, reason)

        await until_async(found, lambda: self.kube.status(name))
        return self.kube.condition(name, kind)[2]
