"""A Redis server of a load test's own, for a cluster whose memories reach into it, and to be killed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

from cluster.config import SightlineConfig
from cluster.errors import ConfigError, SightlineError

START_S = 10.0


@contextlib.contextmanager
def with_redis(config: SightlineConfig) -> Iterator[tuple[SightlineConfig, int]]:
    """The configuration with ``tiers.redis_url`` set to a server that lives as long as the block, and its process id.

    Raises:
        ConfigError: the configuration has a Redis already, which is somebody's, or there is no ``redis-server`` here.
        SightlineError: it did not start.
    """
    if config.tiers.redis_url is not None:
        raise ConfigError("kill-redis kills a Redis that the load test starts; leave tiers.redis_url out for it")
    program = shutil.which("redis-server")
    if program is None:
        raise ConfigError(
            "kill-redis needs the program redis-server on this machine; install it, or leave the fault out"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(port, server)
        tiers = config.tiers.model_copy(update={"redis_url": f"redis://127.0.0.1:{port}/0"})
        yield config.model_copy(update={"tiers": tiers}), server.pid
    finally:
        server.kill()
        server.wait()


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.05)
    raise SightlineError("redis-server did not start on this machine")
