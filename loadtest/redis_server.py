"""A Redis server of a load test's own, for a cluster whose memories reach into it, and to be killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cluster.config import SightlineConfig
from cluster.errors import ConfigError
from cluster.lab.bench.redis_server import RedisServer


@contextlib.contextmanager
def with_redis(config: SightlineConfig) -> Iterator[tuple[SightlineConfig, int]]:
    """The configuration with ``tiers.redis_url`` set to a server that lives as long as the block, and its process id.

    Raises:
        ConfigError: the configuration has a Redis already, which is somebody's, or there is no ``redis-server`` here.
        SightlineError: it did not start.
    """
    if config.tiers.redis_url is not None:
        raise ConfigError("kill-redis kills a Redis that the load test starts; leave tiers.redis_url out for it")
    server = RedisServer()
    try:
        tiers = config.tiers.model_copy(update={"redis_url": server.url})
        yield config.model_copy(update={"tiers": tiers}), server.pid
    finally:
        server.kill()
