"""Windows on two vLLM engines over one node and one Redis: moved, gone on with after a death, forgotten; tiers fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")

from kv_parts import QUICK, Node
from redis_server import RedisServer

from cluster.engine.native import NativeEngine
from cluster.engine.vllm.connector import window_checkpoint
from cluster.engine.vllm.connector.tier_writer import BlockWriter, TierWriter
from cluster.engine.vllm.connector.window_checkpoint import WindowCheckpoints
from cluster.engine.vllm.engine import VllmEngine
from cluster.engine.vllm.reuse_layout import ReuseLayout
from cluster.engine.vllm.settings import VllmSettings
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.tiers import codec
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.stack import TierStack
from cluster.models import load_model
from cluster.types import Answer, MemorySpec, Question, StreamSpec

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


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


class Side:
    """What a replica's engine has of its own: tiers, and what brings windows there."""

    def __init__(self, tiers: TierStack, writer: BlockWriter, engine: VllmEngine) -> None:
        self.tiers, self.writer = tiers, writer
        self.keeper = WindowCheckpoints(tiers, writer, engine.layout.held)

    def written(self) -> None:
        """Until all that waits is in the lowest tier."""
        assert self.writer.flush(60)


class Site:
    """Two replicas over the same node and Redis. They take turns in one engine, which begins each turn with nothing: no
    stream, and no block in its folder."""

    def __init__(self, folder: Path) -> None:
        self.redis = RedisServer(folder)
        self.redis.start()
        self.memory = Arena(2**24, name="node", slab_bytes=2**16)
        self.node = Node(self.memory, fingerprint=MARK)
        first, second = (tiers_of(self.node.address, self.redis.url) for _ in range(2))
        settings = VllmSettings({"max_model_len": 2048}, timeout_s=120.0)
        self.engine = VllmEngine(load_model("tiny-qwen2_5_vl"), mode="reuse", settings=settings, tiers=first)
        self.layout = self.engine.layout
        assert isinstance(self.layout, ReuseLayout)
        assert self.layout.writer is not None
        shape = self.layout.writer.shape
        other = BlockWriter(
            self.layout.blocks, second, shape=shape, fingerprint=self.engine.fingerprint, cap_bytes=2**26
        )
        self.sides = [Side(first, self.layout.writer, self.engine), Side(second, other, self.engine)]

    def turn(self, number: int) -> None:
        """It is this replica's turn, and as if it had just started; the other says nothing more, as after a kill."""
        side = self.sides[number]
        self.engine._streams.clear()
        self.layout._cameras.clear()
        for path in self.layout.blocks.folder.glob("*.kv"):
            path.unlink()
        self.layout.writer, self.engine._keeper = side.writer, side.keeper

    def in_redis(self, stream: str) -> set[str]:
        return {name for name in self.redis.names() if f":{stream}" in name}

    def close(self) -> None:
        self.engine.close()
        for side in self.sides:
            side.writer.close()
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
            refresh="anchors_last",
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

    def same(self) -> int:
        """One window that both answer alike; returns how many of its tokens were reused."""
        mine, natives = self.step()
        assert [a.window for a in mine] == [a.window for a in natives]
        assert [a.score for a in mine] == pytest.approx([a.score for a in natives], abs=NEAR)
        assert mine[0].tokens == natives[0].tokens
        return mine[0].tokens.reused

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


def test_a_window_moves_with_its_kv(site: Site, camera: Callable[..., Camera]) -> None:
    here = camera()
    for _ in range(6):
        here.same()
    restored = site.sides[1].writer.counts
    before = restored["restored"]
    # And back: the first finds what the second wrote.
    for there in (1, 0):
        assert site.engine.hand_over(here.spec.stream).result()
        assert site.engine.memory_bytes(here.spec.stream) == 0
        site.turn(there)
        site.engine.admit(here.spec)
        for _ in range(2):
            assert here.same() > 0
    # The system prompt's block came as well, with those of the frames.
    assert restored["restored"] > before + 4
    # What left the window while it moved is left nowhere.
    site.sides[0].written()
    blocks = {name.rsplit(":", 1)[1] for name in site.in_redis(here.spec.stream) if ":kv:kv:" in name}
    assert len(blocks) == len(site.layout._cameras[here.spec.stream].held) + 1


def test_a_window_survives_its_replica(site: Site, camera: Callable[..., Camera]) -> None:
    """Nobody hands it over, and its sender goes on with a complete frame that follows a gap."""
    here = camera()
    for _ in range(6):
        here.same()
    site.sides[0].written()
    site.turn(1)
    site.engine.admit(here.spec)
    mine, natives = here.step(gap=True)
    assert [(a.window, a.start) for a in mine] == [(a.window, a.start) for a in natives]
    assert [a.score for a in mine] == pytest.approx([a.score for a in natives], abs=NEAR)
    assert mine[0].tokens == natives[0].tokens
    assert mine[0].tokens.reused > mine[0].tokens.new > 0


def test_redis_dies_and_windows_go_on(site: Site, camera: Callable[..., Camera]) -> None:
    here = camera()
    for _ in range(4):
        here.same()
    site.redis.kill()
    try:
        for _ in range(4):
            assert here.same() > 0
    finally:
        site.redis.start()
    until(lambda: all(state.up for side in site.sides for state in side.tiers.states().values()))
    for _ in range(2):
        assert here.same() > 0
    site.sides[0].written()
    names = site.in_redis(here.spec.stream)
    assert any(":manifest:" in name for name in names)
    assert any(":kv:kv:" in name for name in names)


@pytest.mark.parametrize("what", ["tiers", "manifest"])
def test_values_of_another_version_are_dropped_and_the_window_begins_anew(
    site: Site, camera: Callable[..., Camera], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(*{"tiers": (codec, "VERSION", 9), "manifest": (window_checkpoint, "VERSION", 9)}[what])
    here = camera()
    for _ in range(4):
        here.same()
    site.sides[0].written()
    monkeypatch.undo()
    site.memory.drop(here.spec.stream)
    assert [name for name in site.in_redis(here.spec.stream) if ":kv:kv:" in name]
    site.turn(1)
    site.engine.admit(here.spec)
    assert site.sides[1].writer.flush(30)
    assert not [name for name in site.in_redis(here.spec.stream) if ":kv:kv:" in name]
    mine, _ = here.step(gap=True)
    assert mine[0].tokens.reused == 0
    assert here.step()[0][0].tokens.reused > 0


def test_a_block_that_is_damaged_is_computed_and_the_rest_reused(site: Site, camera: Callable[..., Camera]) -> None:
    here = camera()
    for _ in range(6):
        here.same()
    side = site.sides[0]
    side.written()
    site.memory.drop(here.spec.stream)
    newest = max(site.layout._cameras[here.spec.stream].held.items())[1].key
    uid = side.writer._names(here.spec.stream, newest)[0].block
    (broken,) = [name for name in site.in_redis(here.spec.stream) if name.endswith(f":0:0:{uid}")]
    data = bytearray(site.redis.client.get(broken))
    data[-1] ^= 1
    site.redis.client.set(broken, bytes(data))
    site.turn(1)
    counts = site.sides[1].writer.counts
    before = counts["missing"]
    site.engine.admit(here.spec)
    mine, natives = here.step(gap=True)
    assert counts["missing"] == before + 1
    assert 0 < mine[0].tokens.reused < natives[0].tokens.reused


def test_forgetting_reaches_every_tier(site: Site, camera: Callable[..., Camera]) -> None:
    here = camera()
    for _ in range(4):
        here.same()
    site.sides[0].written()
    assert site.in_redis(here.spec.stream)
    forgotten = site.engine.delete_memory(here.spec.stream)
    assert forgotten.frames > 0
    assert forgotten.bytes > 0
    assert not site.in_redis(here.spec.stream)
    assert site.memory.nbytes(here.spec.stream) == 0
    assert site.memory.manifest(here.spec.stream) == (Outcome.MISS, None)
    # The camera goes on with a window of its own.
    here.step(gap=True)
    site.sides[0].written()
    assert site.in_redis(here.spec.stream)


def test_nothing_is_written_of_a_camera_without_a_memory(site: Site, camera: Callable[..., Camera]) -> None:
    here = camera(remembers=False)
    here.same()
    assert site.sides[0].writer.flush(30)
    assert not site.in_redis(here.spec.stream)
    assert site.memory.manifest(here.spec.stream) == (Outcome.MISS, None)
    # Nor of one that has none any more.
    site.engine.admit(replace(here.spec, memory=MemorySpec()))
    here.same()
    site.sides[0].written()
    assert site.in_redis(here.spec.stream)
    site.engine.admit(here.spec)
    here.same()
    site.sides[0].written()
    assert not [name for name in site.in_redis(here.spec.stream) if "sizes" not in name]
    assert not site.engine.hand_over(here.spec.stream).result()


def test_a_pruned_window_moves_without_kv(site: Site, qwen, spec, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = qwen.frames(12, "pruned", seed=5)
    of = spec("pruned", memory=MemorySpec())
    expected = qwen.drive(qwen.native, replace(of, memory=None), samples)
    answers: list[Answer] = []
    for tiers, part in zip([side.tiers for side in site.sides], (samples[:7], samples[7:]), strict=True):
        writer = TierWriter(tiers)
        monkeypatch.setattr(qwen.engine.layout, "writer", writer)
        monkeypatch.setattr(qwen.engine, "_keeper", WindowCheckpoints(tiers, writer, qwen.engine.layout.held))
        qwen.engine.admit(of)
        answers += [answer for sample in part for r in qwen.engine.push(sample) for answer in qwen.engine.step([r])]
        assert qwen.engine.hand_over("pruned").result()
        writer.close()
    assert [a.window for a in answers] == [a.window for a in expected]
    assert [a.score for a in answers] == pytest.approx([a.score for a in expected], abs=2e-5)
    assert not [name for name in site.in_redis("pruned") if ":kv:kv:" in name]
