"""A Redis server of a test's own, which can be killed, stopped, filled and started again."""

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import redis

BINARY = "redis-server"
MISSING = f"tests need {BINARY}: install the Debian package redis-server (make test does)"
_START_S = 20.0


class RedisServer:
    """A child process on a free loopback port, which it keeps over restarts; nothing is kept on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = redis.Redis(port=self.port, socket_timeout=10)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Returns when it answers."""
        found = shutil.which(BINARY)
        if found is None:
            raise RuntimeError(MISSING)
        command = [found, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--enable-debug-command", "yes", "--dir", str(self.folder), *self.options, *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + _START_S
        while True:
            try:
                self.client.ping()
            except redis.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{BINARY} did not start ({self._process.poll()})") from None
                time.sleep(0.02)
            else:
                return

    def freeze(self) -> None:
        """Stop answering, with every connection left open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Die at once, as in a power cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def names(self) -> set[str]:
        """Every key there is."""
        return {name.decode() for name in self.client.scan_iter(count=1000)}

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
