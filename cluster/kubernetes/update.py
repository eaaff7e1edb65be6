"""Hands numbers and templates of pods on to a RayService's Ray clusters, which KubeRay leaves alone.

The chart's hook after ``helm upgrade`` and ``rollback``: ``python -m cluster.kubernetes.update sightline``.
"""

import sys
import time
from collections.abc import Sequence

from cluster.config.cluster import KubernetesConfig
from cluster.errors import ConfigError, SightlineError
from cluster.kubernetes.api import ChangedError, KubernetesApi

TRIES = 5
PAUSE_S = 2.0


def update(api: KubernetesApi, service: str) -> list[str]:
    """Sentences about what was changed.

    Raises:
        SightlineError: the API server refuses, or the groups keep changing.
    """
    told = []
    for cluster in api.ray_clusters(service):
        for left in reversed(range(TRIES)):
            try:
                changed = api.update_ray_cluster(cluster, service)
                break
            except ChangedError:
                if not left:
                    raise
                time.sleep(PAUSE_S)
        told += [f"{cluster}: {name} has the pods of {service} from now on" for name in changed]
    return told


def main(arguments: Sequence[str], config: KubernetesConfig | None = None) -> int:
    """0: all of it is handed on."""
    try:
        if len(arguments) != 1:
            raise ConfigError("name the RayService, and nothing else")
        for line in update(KubernetesApi(config or KubernetesConfig()), arguments[0]):
            print(line)
    except SightlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
