"""Deletes a RayService and waits until its Ray clusters are gone.

The chart's hook before ``helm uninstall``: KubeRay empties the Redis of Ray's tables first, which must still be there.
``python -m cluster.kubernetes.uninstall sightline``.
"""

import sys
import time
from collections.abc import Sequence

from cluster.config.cluster import KubernetesConfig
from cluster.errors import ConfigError, SightlineError, UnavailableError
from cluster.kubernetes.api import KubernetesApi

PATIENCE_S = 240.0
"""Less than Helm waits by itself, so that this is what one reads."""
PAUSE_S = 2.0


def delete_service(api: KubernetesApi, service: str) -> None:
    """Delete it; one that is gone already is no error.

    Raises:
        UnavailableError: the API server refuses, or a Ray cluster is still there after :data:`PATIENCE_S`.
    """
    api.delete_ray_service(service)
    deadline = time.monotonic() + PATIENCE_S
    while left := api.ray_clusters(service):
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"{', '.join(left)} is still there after {PATIENCE_S:g} s; does KubeRay's operator run? "
                "`helm uninstall --no-hooks` goes on without it"
            )
        time.sleep(PAUSE_S)


def main(arguments: Sequence[str], config: KubernetesConfig | None = None) -> int:
    """0: nothing of it is left."""
    try:
        if len(arguments) != 1:
            raise ConfigError("name the RayService, and nothing else")
        delete_service(KubernetesApi(config or KubernetesConfig()), arguments[0])
    except SightlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
