"""Sets the numbers of pods of a RayService's worker groups, which KubeRay takes over from no changed RayService.

The chart's hook: ``python -m cluster.kubernetes.scale sightline decoders=3 replicas=8``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from cluster.config.cluster import KubernetesConfig
from cluster.errors import ConfigError, SightlineError
from cluster.kubernetes.api import ChangedError, KubernetesApi

TRIES = 5
PAUSE_S = 2.0


def scale(api: KubernetesApi, service: str, pods: Mapping[str, int]) -> list[str]:
    """Sentences about what was changed.

    Raises:
        SightlineError: the API server refuses, or the groups keep changing.
    """
    told = []
    for cluster in api.ray_clusters(service):
        for left in reversed(range(TRIES)):
            try:
                changed = api.scale_worker_groups(cluster, pods)
                break
            except ChangedError:
                if not left:
                    raise
                time.sleep(PAUSE_S)
        told += [f"{cluster}: {name} has {pods[name]} pods now" for name in changed]
    return told


def read_counts(arguments: Sequence[str]) -> dict[str, int]:
    """Group -> pods, of ``decoders=3``. Raises ``ConfigError``."""
    found = {}
    for each in arguments:
        name, _, count = each.partition("=")
        if not name or not count.isdigit():
            raise ConfigError(f"{each!r} is no number of pods of a group; write it as in decoders=3")
        found[name] = int(count)
    return found


def main(arguments: Sequence[str], config: KubernetesConfig | None = None) -> int:
    """0: the numbers are set."""
    try:
        service, *counts = arguments or [""]
        for line in scale(KubernetesApi(config or KubernetesConfig()), service, read_counts(counts)):
            print(line)
    except SightlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
