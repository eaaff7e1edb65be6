"""A Redis server of a measurement's own, to be killed and started again."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time

from cluster.errors import ConfigError, SightlineError

START_S = 10.0


class RedisServer:
    """Listens on a free port of this machine, the same at every start, and keeps nothing on disk.

    Raises:
        ConfigError: there is no ``redis-server`` on this machine.
        SightlineError: it did not start.
    """

    def __init__(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise ConfigError("redis-server is needed on this machine; install it, or leave faults of Redis out")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._server.pid

    def start(self) -> None:
        """Start, empty."""
        self._server = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                return
            time.sleep(0.05)
        self.kill()
        raise SightlineError("redis-server did not start on this machine")

    def kill(self) -> None:
        """SIGKILL; what it held is gone."""
        self._server.kill()
        self._server.wait()
