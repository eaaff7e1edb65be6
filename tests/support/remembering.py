"""An engine that remembers over host memory and Redis, beside one that does not, and a camera that both see."""

import functools
from typing import Any

from waiting import until

from cluster.engine.native import NativeEngine
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Tier
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.types import AskResult, AskSpec, MemorySpec, Question, StreamSpec

TEXT = "Is anyone climbing the fence?"
MIB = 2**20
HOST_BYTES = 16 * MIB
DEADLINE_S = 10.0
"""No server that answers takes as long, whatever else runs."""
SHORT_S = 0.6
"""Where a server that stalls is waited for."""


def stream(name: str = "cam", **memory: Any) -> StreamSpec:
    """Windows of 8 s every 4 s; a memory that reads all it holds."""
    chosen = {"compressor": "none", "organiser": "resv", "retriever": "top_k", "retriever_options": {"share": 1.0}}
    spec = MemorySpec(**{**chosen, "block_frames": 3, **memory})  # type: ignore[arg-type]
    return StreamSpec(name, (Question("q", TEXT),), 8.0, 4.0, static_gate=False, memory=spec)


def redis_tier(url: str, fingerprint: str, deadline_s: float = DEADLINE_S) -> RedisTier:
    return RedisTier(url, fingerprint=fingerprint, cap_bytes=64 * MIB, ttl_s=600, deadline_s=deadline_s)


class Bare:
    """What an engine without a memory answers of the camera, computed once for all sites of a model."""

    def __init__(self, model: VisionLanguageModel, name: str) -> None:
        self.engine = NativeEngine(model, max_new_tokens=4)
        self.engine.admit(stream(name))
        self._camera = SyntheticCamera(name, model.geometry, anchor_every=4)
        self._answered: list[list[tuple[int, float, str]]] = []

    def answers(self, number: int) -> list[tuple[int, float, str]]:
        """Window, score and text of what ended with this frame."""
        while len(self._answered) <= number:
            requests = self.engine.push(self._camera.sample(len(self._answered)))
            answers = [answer for request in requests for answer in self.engine.step([request])]
            self._answered.append([(each.window, each.score, each.text) for each in answers])
        return self._answered[number]


bare_of = functools.cache(Bare)


class Site:
    """``engine`` remembers; ``bare`` is given the same frames, and every answer of the two is compared."""

    def __init__(
        self,
        model: VisionLanguageModel,
        url: str | None,
        *,
        host_bytes: int = HOST_BYTES,
        name: str = "cam",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.bare = bare_of(model, name)
        tiers: list[Tier] = [Arena(host_bytes, name="host", slab_bytes=64 * 1024)]
        if url is not None:
            tiers.append(redis_tier(url, self.bare.engine.fingerprint, deadline_s))
        self.tiers = TierStack(tiers)
        self.bank = MemoryBank(self.tiers)
        self.engine = NativeEngine(model, max_new_tokens=4, memories=self.bank)
        self.name, self.seen = name, 0
        self.camera = SyntheticCamera(name, model.geometry, anchor_every=4)
        self.spec = stream(name)
        self.engine.admit(self.spec)

    def watch(self, frames: int) -> int:
        """So many more frames; returns how many windows both answered alike."""
        windows = 0
        for number in range(self.seen, self.seen + frames):
            sample = self.camera.sample(number)
            answers = [answer for request in self.engine.push(sample) for answer in self.engine.step([request])]
            assert [(each.window, each.score, each.text) for each in answers] == self.bare.answers(number)
            windows += len(answers)
            assert self.bank.wait_written(30.0)
        self.seen += frames
        return windows

    def ask(self, tokens: int = 3) -> AskResult:
        return answered(self.engine, self.name, tokens)

    def leave(self) -> None:
        """The engine lets the camera go, and what it remembers is written."""
        self.engine.evict(self.name)
        assert self.bank.wait_written(30.0)

    @property
    def lost(self) -> int:
        return self.bank.get_memory(self.name)[0].counts.lost

    @property
    def held(self) -> int:
        """Tokens in clusters."""
        return sum(head.tokens for _, _, head in self.bank.get_memory(self.name)[0].iter_heads())

    def trouble(self) -> str:
        """What a heartbeat says of the tiers; the operator's view says the same."""
        state = self.bank.memory_reports()[self.name].state
        states = self.engine.memory_status(self.name).tier_states
        assert state == "; ".join(f"{name}: {reason}" for name, reason in states.items() if reason)
        return state

    def tend(self) -> None:
        """As a replica does now and then, frames or none."""
        self.bank.run_maintenance()
        self.tiers.finish_deletions()
        assert self.bank.wait_written(30.0)

    def recovered(self) -> None:
        """Wait until the tiers are all right again by themselves, and everything that is due is in the lowest."""

        def whole() -> bool:
            self.tend()
            memory = self.bank.get_memory(self.name)[0]
            busy = self.tiers.deleting or memory.settle_due or memory.unsaved or not memory.restored
            return not busy and not self.trouble()

        until(whole)


def answered(engine: NativeEngine, name: str = "cam", tokens: int = 3) -> AskResult:
    run = engine.ask(AskSpec(name, TEXT, max_new_tokens=tokens))
    while run.step() is not None:
        pass
    return run.result
