"""Live part of the demo: runs a cluster with push agents and collects its answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from actors.runtime import Cluster
from cluster.client import GatewayClient
from cluster.codec import FileSource
from cluster.config import SightlineConfig
from cluster.errors import SightlineError, UnavailableError
from cluster.types import Answer, CameraStatus
from cluster.wire.push import PushAgent, PushStatus

LOOK_EVERY_S = 0.5
RETRY_S = 0.5


@dataclass(slots=True)
class LiveRun:
    """Last status and all answers of each camera."""

    seconds: float = 0.0
    statuses: dict[str, CameraStatus] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    pushes: dict[str, PushStatus] = field(default_factory=dict)


def run_live(
    config: SightlineConfig,
    pushed: dict[str, Path],
    seconds: float,
    on_phase: Callable[[str], None],
    on_look: Callable[[LiveRun, float], None],
) -> LiveRun:
    """Run a cluster for ``seconds``; everything is stopped when this returns or raises.

    Args:
        pushed: camera -> clip that an agent pushes in a loop, at recording speed.
        on_phase: called with each step of starting; ``on_look``: called twice a second with the state so far.
    """
    run = LiveRun()
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(config, on_phase=on_phase))
        client = stack.enter_context(GatewayClient(cluster.gateway_address))
        stack.enter_context(_Collector(cluster.gateway_address, run))
        agents = stack.enter_context(_Agents(cluster.gateway_address, pushed))
        began = time.monotonic()
        while run.seconds < seconds:
            time.sleep(LOOK_EVERY_S)
            run.seconds = time.monotonic() - began
            run.statuses = {status.name: status for status in client.cameras_list()}
            run.pushes = agents.statuses()
            on_look(run, min(run.seconds, seconds))
            if error := agents.error():
                raise error
        on_phase("stopping the cluster")
    return run


class _Collector:
    """Collects all answers on its own thread, across restarts of the gateway."""

    def __init__(self, address: str, run: LiveRun) -> None:
        self._client = GatewayClient(address)
        self._run = run
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="demo answers", daemon=True)

    def __enter__(self) -> _Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._client.close()
        self._thread.join(5.0)

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                for answer, _ in self._client.watch():
                    self._run.answers[answer.stream].append(answer)
            except (SightlineError, ValueError):
                # ValueError: the channel was closed under the call, which is how this thread is stopped.
                pass
            self._stopping.wait(RETRY_S)


class _Agents:
    """The push agents, on an event loop in its own thread."""

    def __init__(self, address: str, clips: dict[str, Path]) -> None:
        self._address = address
        self._clips = clips
        self._agents: dict[str, PushAgent] = {}
        self._error: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="demo push", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()

    def __enter__(self) -> _Agents:
        self._thread.start()
        self._started.wait(5.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10.0)

    def statuses(self) -> dict[str, PushStatus]:
        """Status of each camera's push."""
        return {name: agent.status for name, agent in self._agents.items()}

    def error(self) -> Exception | None:
        """Why pushing has failed for good, if it has."""
        return self._error

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._push())
        except asyncio.CancelledError:
            pass
        except (SightlineError, UnavailableError) as error:
            self._error = error
        finally:
            self._loop.close()

    async def _push(self) -> None:
        self._task = asyncio.current_task()
        self._agents = {
            name: PushAgent(FileSource(path, loop=True, realtime=True), self._address, name)
            for name, path in self._clips.items()
        }
        self._started.set()
        async with asyncio.TaskGroup() as group:
            for agent in self._agents.values():
                group.create_task(agent.run())
