"""What a load test runs against: a cluster of its own, whose processes it may look at and kill, or a running one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import SightlineConfig
from cluster.errors import ConfigError
from cluster.wire.credentials import ClientCredentials

if TYPE_CHECKING:
    from actors.runtime import Cluster


@dataclass(frozen=True, slots=True)
class Target:
    """``processes()``: process ids by the names that the cluster gives them (``replica-0``, ``gateway``, ``tier``); of
    a cluster elsewhere none are known. It may take a second, and is to be called beside the event loop."""

    gateway: str
    metrics: str | None
    config: SightlineConfig
    processes: Callable[[], dict[str, int]]
    own: bool
    credentials: ClientCredentials | None = None

    def only_own(self, what: str) -> None:
        """Raises ``ConfigError`` for a cluster that this load test did not start."""
        if not self.own:
            raise ConfigError(
                f"{what} needs a cluster that the load test starts itself; leave --gateway out and give --config"
            )


@contextlib.contextmanager
def own_cluster(
    config: SightlineConfig,
    on_phase: Callable[[str], None],
    credentials: ClientCredentials | None = None,
    *,
    beside: Mapping[str, int] | None = None,
) -> Iterator[Target]:
    """A cluster from ``config`` for as long as the block lasts; ``beside``: process ids of what else was started for
    it, by name.

    Raises:
        ConfigError: see ``actors.runtime.Cluster.start``.
    """
    on_phase("loading the libraries")
    from actors.runtime import Cluster

    with Cluster(config, on_phase=on_phase) as cluster:
        yield Target(
            gateway=cluster.gateway_address,
            metrics=cluster.metrics_address,
            config=config,
            processes=lambda: {**_processes(cluster), **(beside or {})},
            own=True,
            credentials=credentials,
        )


def running_cluster(
    gateway: str, metrics: str | None, config: SightlineConfig, credentials: ClientCredentials | None = None
) -> Target:
    """A cluster that somebody else started; ``config`` says what its cameras are added with."""
    return Target(gateway=gateway, metrics=metrics, config=config, processes=dict, own=False, credentials=credentials)


def _processes(cluster: Cluster) -> dict[str, int]:
    import ray
    from ray.exceptions import RayError

    from actors.remote import CONTROLLER, GATEWAY, NAMESPACE, ask_blocking
    from cluster.errors import SightlineError

    found: dict[str, int] = {}
    # Any of them may be restarting just now, and is looked for again later.
    with contextlib.suppress(SightlineError, RayError):
        readiness = cluster.readiness()
        found |= {name: info.pid for name, info in readiness.decoders.items()}
        found |= {name: info.pid for name, info in readiness.replicas.items()}
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    for name in names:
        role = name.split("-")[0]
        if role in (CONTROLLER, GATEWAY, "tier"):
            with contextlib.suppress(SightlineError, RayError, ValueError):
                found[role] = ask_blocking(ray.get_actor(name, namespace=NAMESPACE).process_id.remote(), timeout_s=2.0)
    return found
