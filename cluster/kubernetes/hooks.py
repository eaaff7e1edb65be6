"""Helm hooks of the chart for a RayService: ``python -m cluster.kubernetes.hooks update sightline``.

* ``update``, after ``helm upgrade`` and ``rollback``: copies pod counts and templates to the service's Ray clusters,
  which KubeRay leaves unchanged
* ``uninstall``, before ``helm uninstall``: deletes the service and waits until its Ray clusters are gone, because
  KubeRay first empties the Redis of Ray's tables, which must still exist then
"""

import sys
import time
from collections.abc import Sequence

from cluster.config.cluster import KubernetesConfig
from cluster.errors import ConfigError, SightlineError, UnavailableError
from cluster.kubernetes.api import ChangedError, KubernetesApi

PATIENCE_S = 240.0
"""Below Helm's own timeout, so that this error is the one shown."""
TRIES = 5
PAUSE_S = 2.0


def update(api: KubernetesApi, service: str) -> None:
    """Update the Ray clusters and print the changes. Raises ``SightlineError``: the API server refuses, or the groups
    keep changing."""
    for cluster in api.ray_clusters(service):
        for left in reversed(range(TRIES)):
            try:
                changed = api.update_ray_cluster(cluster, service)
                break
            except ChangedError:
                if not left:
                    raise
                time.sleep(PAUSE_S)
        for name in changed:
            print(f"{cluster}: {name} updated from {service}")


def uninstall(api: KubernetesApi, service: str) -> None:
    """Delete the service, if it exists. Raises ``UnavailableError``: the API server refuses, or a Ray cluster still
    exists after :data:`PATIENCE_S`."""
    api.delete_ray_service(service)
    deadline = time.monotonic() + PATIENCE_S
    while left := api.ray_clusters(service):
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"{', '.join(left)} still exists after {PATIENCE_S:g} s; is KubeRay's operator running? "
                "`helm uninstall --no-hooks` continues without it"
            )
        time.sleep(PAUSE_S)


HOOKS = {"update": update, "uninstall": uninstall}


def main(arguments: Sequence[str], config: KubernetesConfig | None = None) -> int:
    """Run a hook; ``arguments``: its name and the RayService. Returns the exit code."""
    try:
        if len(arguments) != 2 or arguments[0] not in HOOKS:
            raise ConfigError(f"usage: hooks HOOK RAYSERVICE; HOOK is one of {', '.join(HOOKS)}")
        HOOKS[arguments[0]](KubernetesApi(config or KubernetesConfig()), arguments[1])
    except SightlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
