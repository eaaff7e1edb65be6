"""A Redis server of a bench's own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import ConfigError

_START_S = 20.0


@contextmanager
def redis_process() -> Iterator[tuple[str, int]]:
    """Address and process id of an empty server on this machine, which ends with the context.

    Raises:
        ConfigError: there is no redis-server here, or it does not start.
    """
    found = shutil.which("redis-server")
    if found is None:
        raise ConfigError("this part needs redis-server; install the Debian package of that name")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [
            found,
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            folder,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(port)
            yield f"redis://127.0.0.1:{port}/0", process.pid
        finally:
            process.kill()
            process.wait()


def _wait(port: int) -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise ConfigError("redis-server did not start") from None
            time.sleep(0.02)
