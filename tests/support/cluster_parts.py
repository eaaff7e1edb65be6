"""Configuration, an answer collector and waiting, for tests against a running cluster."""

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from cluster.client import GatewayClient
from cluster.config import SightlineConfig, load_config
from cluster.errors import SightlineError, UnavailableError
from cluster.types import Answer

WAIT_S = 150.0
QUESTION = {"id": "person", "text": "Is there a person?"}


def configuration(cameras: list[dict[str, Any]], **cluster: Any) -> SightlineConfig:
    return load_config(
        None,
        {
            "model": {"name": "tiny-qwen2_5_vl", "threads": 1},
            "gateway": {"port": 0, "http_port": 0},
            "sampling": {"anchor_interval_s": 4},
            "window": {"length_s": 4, "stride_s": 2, "static_gate": False},
            "questions": [QUESTION],
            "cameras": cameras,
            # Tests add the clips that they make.
            "security": {"file_roots": [tempfile.gettempdir()]},
            "cluster": {"heartbeat_s": 0.25, "heartbeat_timeout_s": 8, "start_timeout_s": 300, **cluster},
        },
    )


def until(what: str, condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """The condition's value once it is true; the cluster may be unavailable meanwhile."""
    began_s = time.monotonic()
    deadline = began_s + timeout_s
    last: object = None
    while True:
        try:
            if value := condition():
                return value
            last = value
        except UnavailableError as error:
            last = error
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s; last: {last!r}"
        # A look at the cluster is work of three of its processes, which a small machine needs for what is waited for:
        # the longer it takes, the less often, and a tenth of it late at most.
        time.sleep(min(0.05 + 0.1 * (time.monotonic() - began_s), 0.5))


class Answers:
    """Watches a gateway on a thread of its own, through the gateway's restarts."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._answers: list[Answer] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._client: GatewayClient | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(SightlineError, ValueError):
                self._watch()
            self._stopped.wait(0.1)

    def _watch(self) -> None:
        with GatewayClient(self._address, deadline_s=2) as self._client:
            for answer, _ in self._client.watch():
                with self._lock:
                    self._answers.append(answer)

    def of(self, camera: str) -> list[Answer]:
        with self._lock:
            return [answer for answer in self._answers if answer.stream == camera]

    def wait_for_more(self, *cameras: str, count: int = 1, timeout_s: float = WAIT_S) -> None:
        """Of every one of these cameras."""
        most = {camera: len(self.of(camera)) + count for camera in cameras}

        def late() -> list[str]:
            return [camera for camera, wanted in most.items() if len(self.of(camera)) < wanted]

        until(f"{count} more answers of {', '.join(cameras)}", lambda: not late(), timeout_s)

    def stop(self) -> None:
        self._stopped.set()
        if self._client is not None:
            self._client.close()
        self._thread.join(5)


def ray_processes() -> list[psutil.Process]:
    """Processes of any Ray under this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("ray" in part for part in [process.name(), *process.cmdline()[:2]]):
                found.append(process)
    return found
