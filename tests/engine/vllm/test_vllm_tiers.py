"""Windows on two vLLM engines over one node and one Redis: moved, gone on with after a death, forgotten; tiers fail."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")

from kv_parts import QUICK, Node
from redis_server import RedisServer
from waiting import until

from cluster.engine.native import NativeEngine
from cluster.engine.vllm.engine import VllmEngine
from cluster.engine.vllm.settings import VllmSettings
from cluster.engine.vllm.window_checkpoint import WindowCheckpoints
from cluster.engine.window import export
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.stack import TierStack
from cluster.models.loading import load_model
from cluster.types import Answer, MemorySpec, Question, StreamSpec, TokenCount

QUESTIONS = (Question("q", "Is anyone climbing the fence?"), Question("r", "Is there a fire or smoke?"))
NEAR = 2e-4
MARK = "tiny vllm"


def tiers_of(node: str | None, redis: str | None) -> TierStack:
    tiers: list = [Arena(2**24, name="host", slab_bytes=2**16)]
    if node is not None:
        tiers.append(RemoteTier(node, fingerprint=MARK, deadline_s=5.0, backoff=QUICK, name="node"))
    if redis is not None:
        tiers.append(RedisTier(redis, fingerprint=MARK, cap_bytes=2**24, ttl_s=600, deadline_s=5.0))
    return TierStack(tiers)


class Site:
    """Two replicas over the same node and Redis. They take turns in one engine, which begins each turn without a
    stream."""

    def __init__(self, folder: Path) -> None:
        self.redis = RedisServer(folder)
        self.redis.start()
        self.memory = Arena(2**24, name="node", slab_bytes=2**16)
        self.node = Node(self.memory, fingerprint=MARK)
        first, second = (tiers_of(self.node.address, self.redis.url) for _ in range(2))
        settings = VllmSettings({"max_model_len": 2048}, timeout_s=120.0)
        self.engine = VllmEngine(load_model("tiny-qwen2_5_vl"), settings=settings, tiers=first)
        assert self.engine._checkpoints is not None
        self.sides = [self.engine._checkpoints, WindowCheckpoints(second)]

    def turn(self, number: int) -> None:
        """It is this replica's turn, and as if it had just started; the other says nothing more, as after a kill."""
        self.engine._streams.clear()
        self.engine._checkpoints = self.sides[number]

    def written(self) -> None:
        """Until all that the first replica has to write is in the lowest tier."""
        assert self.sides[0].writer.wait_idle(60)

    def in_redis(self, stream: str) -> set[str]:
        return {name for name in self.redis.names() if f":{stream}" in name}

    def close(self) -> None:
        self.engine.close()
        for side in self.sides:
            side.close()
            side.tiers.close()
        self.node.stop()
        self.redis.kill()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    torch.set_num_threads(1)
    site = Site(tmp_path_factory.mktemp("redis"))
    yield site
    site.close()


class Camera:
    """One camera on an engine and on the native one, whose answers it must give."""

    def __init__(self, site: Site, name: str, *, remembers: bool = True) -> None:
        site.turn(0)
        self.engine = site.engine
        self.native = NativeEngine(load_model("tiny-qwen2_5_vl"))
        self.frames = iter(SyntheticCamera(name, self.native.geometry, kept=0.4, empty=0.2, anchor_every=4))
        self.spec = StreamSpec(
            name,
            QUESTIONS,
            window_s=8,
            stride_s=2,
            refresh="all",
            static_gate=False,
            memory=MemorySpec() if remembers else None,
        )
        for engine in (self.engine, self.native):
            engine.admit(self.spec)

    def step(self, *, gap: bool = False) -> tuple[list[Answer], list[Answer]]:
        """Frames until the next window, the first as after a lost connection where ``gap``; both engines' answers.

        After an even number of windows the next frame is complete, as a sender's is that lost its replica.
        """
        while True:
            sample = next(self.frames)
            assert sample.complete or not gap
            mine = self.engine.push(replace(sample, gap=gap))
            natives = self.native.push(sample)
            gap = False
            if mine:
                return self.engine.step(mine), self.native.step(natives)

    def same(self, *, gap: bool = False) -> TokenCount:
        """One window that both answer alike; what it computed."""
        mine, natives = self.step(gap=gap)
        assert [(a.window, a.start) for a in mine] == [(a.window, a.start) for a in natives]
        assert [a.score for a in mine] == pytest.approx([a.score for a in natives], abs=NEAR)
        assert mine[0].tokens.kept == natives[0].tokens.kept
        return mine[0].tokens

    def end(self) -> None:
        self.engine.delete_memory(self.spec.stream)
        self.engine.evict(self.spec.stream)


@pytest.fixture
def camera(site: Site, request: pytest.FixtureRequest) -> Iterator[Callable[..., Camera]]:
    made: list[Camera] = []

    def make(**options: bool) -> Camera:
        made.append(Camera(site, request.node.name, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_a_window_moves(site: Site, camera: Callable[..., Camera]) -> None:
    here = camera()
    for _ in range(6):
        here.same()
    # And back: the first finds what the second wrote.
    for there in (1, 0):
        assert site.engine.hand_over(here.spec.stream).result()
        assert site.engine.memory_bytes(here.spec.stream) == 0
        site.turn(there)
        site.engine.admit(here.spec)
        for _ in range(2):
            # Its frames are not encoded again.
            tokens = here.same()
            assert tokens.encoded < tokens.kept


def test_a_window_survives_its_replica(site: Site, camera: Callable[..., Camera]) -> None:
    """Nobody hands it over, and its sender goes on with a complete frame that follows a gap."""
    here = camera()
    for _ in range(6):
        here.same()
    site.written()
    site.turn(1)
    site.engine.admit(here.spec)
    tokens = here.same(gap=True)
    assert tokens.encoded < tokens.kept


def test_redis_dies_and_windows_go_on(site: Site, camera: Callable[..., Camera]) -> None:
    here = camera()
    for _ in range(4):
        here.same()
    site.redis.kill()
    try:
        for _ in range(4):
            here.same()
    finally:
        site.redis.start()
    until(lambda: all(state.up for side in site.sides for state in side.tiers.states().values()))
    for _ in range(2):
        here.same()
    site.written()
    assert any(":manifest:" in name for name in site.in_redis(here.spec.stream))


def test_a_manifest_of_another_version_is_dropped_and_the_window_begins_anew(
    site: Site, camera: Callable[..., Camera], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "VERSION", 9)
    here = camera()
    for _ in range(4):
        here.same()
    site.written()
    monkeypatch.undo()
    site.turn(1)
    site.engine.admit(here.spec)
    assert site.sides[1].writer.wait_idle(30)
    assert site.memory.manifest(here.spec.stream) == (Outcome.MISS, None)
    mine, natives = here.step(gap=True)
    assert mine[0].tokens.encoded == mine[0].tokens.kept < natives[0].tokens.kept


def test_forgetting_reaches_every_tier(site: Site, camera: Callable[..., Camera]) -> None:
    here = camera()
    for _ in range(4):
        here.same()
    site.written()
    assert site.in_redis(here.spec.stream)
    forgotten = site.engine.delete_memory(here.spec.stream).result()
    assert forgotten.frames > 0
    assert forgotten.bytes > 0
    assert not site.in_redis(here.spec.stream)
    assert site.memory.nbytes(here.spec.stream) == 0
    assert site.memory.manifest(here.spec.stream) == (Outcome.MISS, None)
    # The camera goes on with a window of its own.
    here.step(gap=True)
    site.written()
    assert site.in_redis(here.spec.stream)


def test_nothing_is_written_of_a_camera_without_a_memory(site: Site, camera: Callable[..., Camera]) -> None:
    here = camera(remembers=False)
    here.same()
    assert site.sides[0].writer.wait_idle(30)
    assert not site.in_redis(here.spec.stream)
    assert site.memory.manifest(here.spec.stream) == (Outcome.MISS, None)
    # Nor of one that has none any more.
    site.engine.admit(replace(here.spec, memory=MemorySpec()))
    here.same()
    site.written()
    assert site.in_redis(here.spec.stream)
    site.engine.admit(here.spec)
    here.same()
    site.written()
    assert not [name for name in site.in_redis(here.spec.stream) if "sizes" not in name]
    assert not site.engine.hand_over(here.spec.stream).result()
