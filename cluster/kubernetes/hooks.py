"""Hooks of the chart around a RayService: ``python -m cluster.kubernetes.hooks update sightline``.

* ``update``, after ``helm upgrade`` and ``rollback``: hands numbers and templates of pods on to the service's Ray
  clusters, which KubeRay leaves alone
* ``uninstall``, before ``helm uninstall``: deletes the service and waits until its Ray clusters are gone, since KubeRay
  empties the Redis of Ray's tables first, which must still be there
"""

import sys
import time
from collections.abc import Sequence

from cluster.config.cluster import KubernetesConfig
from cluster.errors import ConfigError, SightlineError, UnavailableError
from cluster.kubernetes.api import ChangedError, KubernetesApi

PATIENCE_S = 240.0
"""Less than Helm waits by itself, so that this is what one reads."""
TRIES = 5
PAUSE_S = 2.0


def update(api: KubernetesApi, service: str) -> None:
    """Print what was changed. Raises ``SightlineError``: the API server refuses, or the groups keep changing."""
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
            print(f"{cluster}: {name} has the pods of {service} from now on")


def uninstall(api: KubernetesApi, service: str) -> None:
    """Delete the service; one that is gone already is no error. Raises ``UnavailableError``: the API server refuses, or
    a Ray cluster is still there after :data:`PATIENCE_S`."""
    api.delete_ray_service(service)
    deadline = time.monotonic() + PATIENCE_S
    while left := api.ray_clusters(service):
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"{', '.join(left)} is still there after {PATIENCE_S:g} s; does KubeRay's operator run? "
                "`helm uninstall --no-hooks` goes on without it"
            )
        time.sleep(PAUSE_S)


HOOKS = {"update": update, "uninstall": uninstall}


def main(arguments: Sequence[str], config: KubernetesConfig | None = None) -> int:
    """The name of a hook, and the RayService; 0 when it is done."""
    try:
        if len(arguments) != 2 or arguments[0] not in HOOKS:
            raise ConfigError(f"name the hook ({', '.join(HOOKS)}), name the RayService, and nothing else")
        HOOKS[arguments[0]](KubernetesApi(config or KubernetesConfig()), arguments[1])
    except SightlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
