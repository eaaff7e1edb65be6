"""Child processes of benches: Python modules with a line protocol on stdin and stdout, and a Redis server."""

import asyncio
import contextlib
import json
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from cluster.errors import ConfigError, SightlineError
from cluster.wire.server import RpcServer

_REDIS_START_S = 20.0


def free_port() -> int:
    """A currently unused local port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Process(contextlib.AbstractContextManager["Process"]):
    """Starts ``python -m module arguments``; as a context manager, stops it on exit. A module that exits when its stdin
    closes cannot outlive the bench.

    Args:
        quiet: discard its stderr.
    """

    def __init__(self, module: str, *arguments: str, quiet: bool = False) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._quiet = quiet
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process, initially or after :meth:`kill`."""
        stderr = subprocess.DEVNULL if self._quiet else None
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )

    @cached_property
    def hello(self) -> dict[str, Any]:
        """First line of its output; blocks until written."""
        return self._line()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.hello['port']}"

    def ask(self) -> dict[str, Any]:
        """Write a line to its stdin; returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def stop(self) -> None:
        """Close its stdin and wait; kill it if it does not exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL if it still runs, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SightlineError(f"a process of the bench ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def serve(server: RpcServer, hello: dict[str, Any], more: Callable[[], dict[str, Any]] = dict) -> None:
    """Child side of :class:`Process`: print the port and ``hello``, answer every line with :func:`used` and ``more``,
    and stop when stdin closes."""
    print(json.dumps({"port": server.bind("127.0.0.1", 0), **hello}), flush=True)
    await server.start()
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(used() | more()), flush=True)
    await server.stop(0.0)


def used() -> dict[str, Any]:
    """This process's CPU seconds (``user_s``, ``system_s``, and ``threads`` by name without numbers), minor page
    ``faults`` and context ``switches`` so far, and its current resident bytes, ``rss``."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    names = {thread.native_id: re.sub(r"[\W\d_]+.*", "", thread.name) for thread in threading.enumerate()}
    threads: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            # The thread has just ended.
            continue
        name = names.get(int(task.name), "native")
        threads[name] = threads.get(name, 0.0) + seconds
    return {
        "user_s": usage.ru_utime,
        "system_s": usage.ru_stime,
        "faults": usage.ru_minflt,
        "switches": usage.ru_nvcsw + usage.ru_nivcsw,
        "threads": threads,
        "rss": psutil.Process().memory_info().rss,
    }


class RedisServer(contextlib.AbstractContextManager["RedisServer"]):
    """A local Redis server without persistence, on a free port that is kept over restarts; as a context manager, killed
    on exit. Raises ``ConfigError`` if ``redis-server`` is not installed, ``SightlineError`` if it does not start."""

    def __init__(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise ConfigError("redis-server is needed on this machine; install the Debian package of that name")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._server.pid

    def start(self) -> None:
        """Start the server, empty."""
        self._server = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + _REDIS_START_S
        while time.monotonic() < deadline_s and self._server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                return
            time.sleep(0.05)
        self.kill()
        raise SightlineError("redis-server did not start on this machine")

    def kill(self) -> None:
        """Send SIGKILL; the data is lost."""
        self._server.kill()
        self._server.wait()
