"""``VllmEngine`` in mode reuse: the native engine's answers in the same order, with as much computed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")

from cluster.engine.base import Engine, WindowRequest
from cluster.engine.native import NativeEngine
from cluster.engine.vllm.engine import VllmEngine
from cluster.engine.vllm.reuse_layout import ReuseLayout
from cluster.engine.vllm.settings import VllmSettings
from cluster.engine.window.windowed_engine import WindowStats
from cluster.errors import UnavailableError
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel
from cluster.types import Answer, Question, StreamSpec

QUESTIONS = (Question("q", "Is anyone climbing the fence?"), Question("r", "Is there a fire or smoke?"))
NEAR = 2e-4


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    torch.set_num_threads(1)
    return load_model("tiny-qwen2_5_vl")


@pytest.fixture(scope="module")
def engine(model: VisionLanguageModel) -> Iterator[VllmEngine]:
    engine = VllmEngine(model, mode="reuse", settings=VllmSettings({"max_model_len": 2048}, timeout_s=120.0))
    yield engine
    path = layout_of(engine).blocks.folder
    engine.close()
    assert not path.exists()


def layout_of(engine: VllmEngine) -> ReuseLayout:
    assert isinstance(engine.layout, ReuseLayout)
    return engine.layout


class Pair:
    """Cameras on both engines, stepped alike."""

    def __init__(self, engine: VllmEngine, names: list[str], **options: object) -> None:
        self.engine, self.native = engine, NativeEngine(engine.model)
        self.cameras = [
            iter(SyntheticCamera(name, engine.geometry, kept=0.4, empty=0.2, anchor_every=4, seed=seed))
            for seed, name in enumerate(names)
        ]
        for each in self.engines:
            for name in names:
                spec = StreamSpec(name, QUESTIONS, window_s=8, stride_s=2, refresh="anchors_last", static_gate=False)
                each.admit(replace(spec, **options))

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.engine, self.native

    def push(self) -> tuple[list[WindowRequest], list[WindowRequest]]:
        """Frames until the next window of every camera."""
        requests: tuple[list[WindowRequest], list[WindowRequest]] = ([], [])
        for camera in self.cameras:
            closed: list[WindowRequest] = []
            while not closed:
                sample = next(camera)
                closed = self.engine.push(sample)
                requests[1].extend(self.native.push(sample))
            requests[0].extend(closed)
        return requests

    def step(self) -> tuple[list[Answer], list[Answer]]:
        mine, natives = self.push()
        return self.engine.step(mine), self.native.step(natives)

    def same(self) -> list[WindowStats]:
        """One step; the answers agree, and so does where every token came from."""
        mine, natives = self.step()
        assert [(a.stream, a.question) for a in mine] == [(a.stream, a.question) for a in natives]
        for one, two in zip(mine, natives, strict=True):
            assert one.score == pytest.approx(two.score, abs=NEAR)
            assert one.tokens == two.tokens
        return list(self.engine.stats.windows)


def test_it_answers_as_the_native_engine_does(engine: VllmEngine) -> None:
    pair = Pair(engine, ["one", "two"])
    windows = [window for _ in range(8) for window in pair.same()]
    assert sum(window.tokens.reused for window in windows) > sum(window.tokens.new for window in windows)
    assert any(window.tokens.refreshed for window in windows)
    for window in windows:
        # The second question computes itself and the last, partial block of the window.
        assert window.computed <= window.tokens.computed + 32


def test_parts_of_frames_are_refreshed(engine: VllmEngine) -> None:
    pair = Pair(engine, ["parts"], refresh_budget=0.15)
    windows = [window for _ in range(8) for window in pair.same()]
    assert any(0 < window.tokens.refreshed < 16 for window in windows)


def test_blocks_of_frames_that_left_are_given_back(engine: VllmEngine) -> None:
    pair = Pair(engine, ["leaves"])
    held = []
    for _ in range(10):
        pair.same()
        held.append(layout_of(engine).blocks.nbytes)
    assert max(held[-4:]) < 2 * min(held[-4:])
    engine.evict("leaves")
    assert layout_of(engine).blocks.nbytes < held[-1]


def test_a_block_that_is_damaged_costs_a_full_window(engine: VllmEngine) -> None:
    pair = Pair(engine, ["harmed", "unharmed"])
    for _ in range(6):
        pair.same()
    harmed = layout_of(engine)._cameras["harmed"]
    key = next(held.key for pts, held in sorted(harmed.held.items(), reverse=True))
    path = layout_of(engine).blocks.path(key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)
    mine, natives = pair.step()
    windows = {window.stream: window for window in engine.stats.windows}
    assert windows["harmed"].tokens.reused == 0
    assert windows["unharmed"].tokens.reused > 0
    for one, two in zip(mine, natives, strict=True):
        if one.stream == "unharmed":
            assert one.score == pytest.approx(two.score, abs=NEAR)
    pair.step()
    assert all(window.tokens.reused > 0 for window in engine.stats.windows)


def test_a_window_goes_on_after_the_core_died(engine: VllmEngine) -> None:
    """Its blocks are in shared memory, which the core does not take along."""
    pair = Pair(engine, ["moves"])
    for _ in range(6):
        pair.same()
    mine, natives = pair.push()
    os.kill(engine.processes()[0], signal.SIGKILL)
    with pytest.raises(UnavailableError):
        engine.step(mine)
    ours, theirs = engine.step(mine), pair.native.step(natives)
    assert [one.score for one in ours] == pytest.approx([two.score for two in theirs], abs=NEAR)
    (window,) = engine.stats.windows
    assert window.tokens.reused > 0
