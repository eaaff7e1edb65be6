"""Live part of the demo: runs a cluster with push agents and collects its answers."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from actors.runtime import Cluster
from cluster.client import GatewayClient
from cluster.codec import FileSource
from cluster.config import SightlineConfig
from cluster.types import Answer, CameraStatus
from cluster.wire.push import PushAgent, PushStatus
from loadtest.target import Listener

LOOK_EVERY_S = 0.5


@dataclass(slots=True)
class LiveRun:
    """Last status and all answers of each camera."""

    seconds: float = 0.0
    statuses: dict[str, CameraStatus] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    pushes: dict[str, PushStatus] = field(default_factory=dict)

    def add_answer(self, answer: Answer, _seen_s: float) -> None:
        self.answers[answer.stream].append(answer)


def run_live(
    config: SightlineConfig,
    pushed: Mapping[str, Path],
    seconds: float,
    on_phase: Callable[[str], None],
    on_look: Callable[[LiveRun, float], None],
) -> LiveRun:
    """Run a cluster for ``seconds``; everything is stopped when this returns or raises.

    ``pushed``: camera -> clip that an agent pushes in a loop, at recording speed; ``on_phase``: called with each phase
    of starting; ``on_look``: called twice a second with the state so far. Raises ``SightlineError``: the cluster does
    not start, or refuses a pushed camera.
    """
    run = LiveRun()
    with Cluster(config, on_phase=on_phase) as cluster, GatewayClient(cluster.gateway_address) as client:
        try:
            asyncio.run(_run(run, client, pushed, seconds, on_look))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        on_phase("stopping the cluster")
    return run


async def _run(
    run: LiveRun,
    client: GatewayClient,
    pushed: Mapping[str, Path],
    seconds: float,
    on_look: Callable[[LiveRun, float], None],
) -> None:
    agents = {
        name: PushAgent(FileSource(path, loop=True, realtime=True), client.address, name)
        for name, path in pushed.items()
    }
    async with asyncio.TaskGroup() as group:
        parts = [Listener(client.address, run.add_answer).run(), *(agent.run() for agent in agents.values())]
        tasks = [group.create_task(part) for part in parts]
        began = time.monotonic()
        while run.seconds < seconds:
            await asyncio.sleep(LOOK_EVERY_S)
            run.seconds = time.monotonic() - began
            run.statuses = {status.name: status for status in await asyncio.to_thread(client.cameras_list)}
            run.pushes = {name: agent.status for name, agent in agents.items()}
            on_look(run, min(run.seconds, seconds))
        for task in tasks:
            task.cancel()
