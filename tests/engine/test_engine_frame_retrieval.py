"""Frames that read their camera's past: moves, host memory, gaps, restarts, tiers that are slow or fail, and costs."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cluster.engine.native import NativeEngine
from cluster.errors import ConfigError
from cluster.memory import prefetch
from cluster.memory.bank import MemoryBank
from cluster.memory.frame_retrieval import ReSVFrames, make_frame_retrieval
from cluster.memory.retrieval_session import RetrievalSession, RetrievedKV
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import BlockKey, Loaded
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.types import Answer, FrameSample, MemorySpec, StreamSpec


@pytest.fixture
def reading(make_spec) -> Callable[..., StreamSpec]:
    """Cameras whose frames read all that is remembered, of which nothing is evicted."""

    def make(stream: str = "cam", *, refresh: str = "anchors", **memory: Any) -> StreamSpec:
        standard: dict[str, Any] = {
            "compressor": "none",
            "block_frames": 3,
            "frame_retrieval": "resv",
            "kv_dtype": "model",
        }
        options = {"frame_retrieval_options": {"ratio": 1.0, "deadline_s": 60.0}}
        return make_spec(stream, refresh=refresh, memory=MemorySpec(**{**standard, **options, **memory}))

    return make


@pytest.fixture
def make_engine(model) -> Callable[..., NativeEngine]:
    def make(tier: Arena | None = None, **options: Any) -> NativeEngine:
        return NativeEngine(model, memories=MemoryBank(TierStack([tier or Arena(64 * 2**20)])), **options)

    return make


def watch(engine: NativeEngine, samples: Sequence[FrameSample]) -> list[Answer]:
    """A frame at a time: as fast as they can be made, a busy machine would drop what its memory has no time for."""
    answers = []
    for sample in samples:
        for request in engine.push(sample):
            answers += engine.step([request])
        assert engine.memories is not None
        assert engine.memories.wait_written()
    return answers


def scores(answers: Sequence[Answer]) -> list[float]:
    return [answer.score for answer in answers]


def reads(engine: NativeEngine) -> Any:
    [window] = engine.stats.windows
    return window.reads


def test_a_moved_window_and_its_memory_go_on_as_if_they_had_stayed(make_engine, make_camera, reading) -> None:
    samples = [make_camera().sample(number) for number in range(24)]
    stayed = make_engine()
    stayed.admit(reading())
    expected = watch(stayed, samples)
    # The tier that both can read is the only one.
    shared = Arena(64 * 2**20)
    before, after = make_engine(shared), make_engine(shared)
    before.admit(reading())
    first = watch(before, samples[:17])
    state = before.export_stream("cam")
    before.memories.save_stream("cam")
    before.memories.release_stream("cam")
    assert before.memories.wait_written()
    after.admit(reading())
    after.import_stream(reading(), state)
    moved = [*first, *watch(after, samples[17:])]
    assert reads(after).read_tokens > 0
    assert scores(moved) == pytest.approx(scores(expected), abs=1e-5)


def test_windows_that_wait_in_host_memory_read_the_same(make_engine, make_camera, reading) -> None:
    cameras = [make_camera(stream=name, seed=seed) for seed, name in enumerate(("a", "b", "c"))]
    found: list[dict[tuple[str, int], float]] = []
    engine = make_engine()
    for room in (None, 0.5):
        if room is not None:
            slots = round(room * engine.pool.used) + 60
            engine = make_engine(kv_bytes=slots * engine.pool.slot_bytes, host_kv_bytes=2**30)
        for camera in cameras:
            engine.admit(reading(camera.stream))
        answers: list[Answer] = []
        for number in range(20):
            requests = [request for camera in cameras for request in engine.push(camera.sample(number))]
            answers += engine.step(requests)
            assert engine.memories.wait_written()
        found.append({(answer.stream, answer.window): answer.score for answer in answers})
    assert engine.pool.host_used > 0
    assert sum(window.reads.frames for window in engine.stats.windows) > 0
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_passes_of_few_rows_read_the_same_and_cut_no_frame(make_engine, make_camera, reading) -> None:
    samples = [make_camera().sample(number) for number in range(20)]
    found = []
    for rows in (4096, 7):
        engine = make_engine()
        engine.pass_rows = rows
        engine.admit(reading(refresh="all"))
        found.append((scores(watch(engine, samples)), reads(engine)))
    (whole, at_once), (cut, in_pieces) = found
    assert cut == pytest.approx(whole, abs=1e-5)
    assert in_pieces.frames == at_once.frames > 1
    assert in_pieces.read_tokens == at_once.read_tokens


def test_after_a_gap_frames_read_what_was_before_it(make_engine, make_camera, reading) -> None:
    engine = make_engine()
    engine.admit(reading())
    samples = [make_camera().sample(number) for number in range(30)]
    watch(engine, samples[:16])
    before = reads(engine).read_tokens
    jumped = [
        dataclasses.replace(sample, pts=sample.pts + 600_000_000, gap=number == 0)
        for number, sample in enumerate(samples[16:])
    ]
    watch(engine, jumped)
    assert reads(engine).read_tokens > before


def test_after_a_clock_was_set_back_frames_read_what_was_before_it(make_engine, make_camera, reading) -> None:
    engine = make_engine()
    engine.admit(reading())
    samples = [make_camera().sample(number) for number in range(16)]
    before = watch(engine, samples)
    after = watch(engine, [dataclasses.replace(samples[0], fresh=True), *samples[1:4]])
    memory, _ = engine.memories.get_memory("cam")
    assert memory.memory_time(samples[3].pts) > samples[15].pts
    # By the camera's clock, what came before is after the window. Each frame reads all of it, once, in
    # every layer but the last, which only projects its rows.
    assert memory.frames == sum(sample.tokens > 0 for sample in samples)
    layers = len(engine.model.layers)
    assert reads(engine).read_tokens * layers == reads(engine).frames * memory.tokens * (layers - 1) > 0
    after += watch(engine, samples[4:])
    assert reads(engine).read_tokens == reads(engine).held_tokens > 0
    # Its memory goes on 10 s after its newest frame.
    assert {answer.memory_shift for answer in before} == {0}
    assert {answer.memory_shift for answer in after} == {samples[15].pts + 10_000_000 - samples[0].pts}


class Slow(Arena):
    """A tier whose blocks take their time, and that is not in this process."""

    at_hand = False
    takes_s = 0.0

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        time.sleep(self.takes_s)
        return super().load(keys)


def test_blocks_that_are_late_are_counted_and_left_out(make_engine, make_camera, reading) -> None:
    tier = Slow(64 * 2**20)
    engine = make_engine(tier)
    engine.admit(reading(frame_retrieval_options={"ratio": 1.0, "deadline_s": 0.4, "prefetch": False}))
    samples = [make_camera().sample(number) for number in range(20)]
    watch(engine, samples[:18])
    assert reads(engine).unavailable == 0
    in_time = reads(engine)
    tier.takes_s = 1.0
    assert watch(engine, samples[18:])
    late = reads(engine)
    assert late.unavailable > 0
    assert late.clusters == 0
    # Of all layers and frames together: each alone would wait so long.
    assert late.waited_s < 0.4 * late.frames * len(engine.model.layers)
    assert late.read_tokens < in_time.read_tokens


class Held(Arena):
    """A tier that gives nothing while it is held, and that is not in this process."""

    at_hand = False

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.free = threading.Event()
        self.free.set()

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        assert self.free.wait(60.0)
        return super().load(keys)


def test_a_tier_that_hangs_costs_a_step_of_many_cameras_one_deadline(
    make_engine, make_camera, reading, monkeypatch
) -> None:
    # Who waited for its loads would wait for ever.
    monkeypatch.setattr(prefetch, "_JOIN_S", 3600.0)
    tier = Held(64 * 2**20)
    engine = make_engine(tier)
    cameras = [make_camera(stream=name) for name in ("a", "b", "c")]
    for camera in cameras:
        engine.admit(reading(camera.stream, frame_retrieval_options={"ratio": 1.0, "deadline_s": 0.2}))
    for number in range(20):
        if number == 18:
            tier.free.clear()
        requests = [request for camera in cameras for request in engine.push(camera.sample(number))]
        answers = engine.step(requests)
        assert number >= 18 or engine.memories.wait_written()
    reads = [window.reads for window in engine.stats.windows]
    assert len(answers) == len(reads) == 3
    tier.free.set()
    assert all(each.unavailable > 0 and each.clusters == 0 for each in reads)
    # The first has waited for all of them.
    assert reads[0].waited_s >= 0.2
    assert reads[1].waited_s + reads[2].waited_s < 0.2


class Broken(Slow):
    """A tier that raises, against its contract."""

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        if self.takes_s:
            raise OSError("the disk is gone")
        return super().load(keys)


def test_a_tier_that_fails_costs_the_past_and_no_window(make_engine, make_camera, reading, caplog) -> None:
    tier = Broken(64 * 2**20)
    engine = make_engine(tier)
    engine.admit(reading())
    samples = [make_camera().sample(number) for number in range(20)]
    watch(engine, samples[:18])
    tier.takes_s = 1.0
    answers = [
        answer for sample in samples[18:] for request in engine.push(sample) for answer in engine.step([request])
    ]
    assert len(answers) == 1
    assert reads(engine).unavailable > 0
    assert "could not read a part of their past" in caplog.text


def test_forgotten_frames_are_not_read(make_engine, make_camera, reading) -> None:
    engine = make_engine()
    engine.admit(reading())
    samples = [make_camera().sample(number) for number in range(20)]
    watch(engine, samples[:18])
    engine.delete_memory("cam")
    watch(engine, samples[18:])
    assert reads(engine).frames == 0


def test_costs_come_with_the_window(make_engine, make_camera, reading, model: VisionLanguageModel) -> None:
    samples = [make_camera().sample(number) for number in range(20)]
    runs = {}
    for name in (None, "resv"):
        engine = make_engine()
        options = {} if name is None else {"ratio": 1.0, "deadline_s": 60.0}
        engine.admit(reading(frame_retrieval=name, frame_retrieval_options=options))
        watch(engine, samples)
        [runs[name]] = engine.stats.windows
    without, window = runs[None], runs["resv"]
    read = window.reads
    assert without.reads.frames == without.reads.flops == 0
    assert window.computed == without.computed
    layers, heads = len(model.layers), model.text_config.num_key_value_heads
    # Rows of the last stride's two frames, each of which reads all that has left the window, but in the last layer.
    memory, _ = engine.memories.get_memory("cam")
    held = memory.tokens / layers / heads
    rows = window.tokens.new + window.tokens.refreshed
    share = (layers - 1) / layers
    assert window.attended - without.attended == pytest.approx(rows * held * share)
    assert read.held_tokens == read.read_tokens == pytest.approx(read.frames * memory.tokens * share)
    assert read.bytes > 0
    assert window.llm_flops == model.llm_flops(window.computed, window.attended, window.omitted) + read.flops
    # At least every score of a row and a cluster, twice: predicted, too, in every layer but the first.
    size = engine.pool.k.shape[3]
    clusters = sum(len(head.table) for row in memory.heads[:-1] for head in row) / heads
    assert read.flops >= 2 * size * model.text_config.num_attention_heads * rows * clusters


def test_a_share_of_the_attention_reads_a_part(make_engine, make_camera, reading) -> None:
    engine = make_engine()
    engine.admit(reading(block_frames=1, frame_retrieval_options={"ratio": 0.1, "deadline_s": 60.0}))
    watch(engine, [make_camera().sample(number) for number in range(30)])
    assert 0 < reads(engine).read_tokens < reads(engine).held_tokens


def test_what_each_frame_reads_is_counted_without_asking_the_device(
    make_engine, make_camera, reading, monkeypatch
) -> None:
    counted: list[tuple[list[int], list[int]]] = []
    fetch = RetrievalSession.fetch_groups

    def watched(session: RetrievalSession, *given: Any) -> tuple[RetrievedKV, torch.Tensor]:
        found, readers = fetch(session, *given)
        counted.append((found.read, readers.sum((1, 2)).tolist()))
        return found, readers

    monkeypatch.setattr(RetrievalSession, "fetch_groups", watched)
    engine = make_engine()
    engine.admit(reading(block_frames=1, frame_retrieval_options={"ratio": 0.3, "deadline_s": 60.0}))
    watch(engine, [make_camera().sample(number) for number in range(24)])
    assert all(said == found for said, found in counted)
    assert any(len(set(found)) > 1 for _, found in counted)


def test_prefetch_changes_when_blocks_come_and_not_which(make_engine, make_camera, reading) -> None:
    samples = [make_camera().sample(number) for number in range(24)]
    found = []
    for ahead in (True, False):
        engine = make_engine()
        options = {"ratio": 0.3, "deadline_s": 60.0, "prefetch": ahead}
        engine.admit(reading(block_frames=1, frame_retrieval_options=options))
        found.append((scores(watch(engine, samples)), reads(engine)))
    assert found[0][0] == found[1][0]
    assert found[0][1].read_tokens == found[1][1].read_tokens > 0


def test_bfloat16_stays_close_to_float32(make_camera, reading) -> None:
    from cluster.models.loading import load_model

    samples = [make_camera().sample(number) for number in range(20)]
    found = []
    for dtype in ("float32", "bfloat16"):
        model = load_model("tiny-qwen2_5_vl", dtype=dtype)
        engine = NativeEngine(model, memories=MemoryBank(TierStack([Arena(64 * 2**20)])))
        engine.admit(reading())
        found.append(scores(watch(engine, samples)))
    assert found[1] == pytest.approx(found[0], abs=0.02)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"organiser": "tokens"}, "reads the hash-bit clusters that the organiser 'resv' makes, not 'tokens'"),
        ({"frame_retrieval": "rsev"}, "unknown frame retrieval 'rsev'; did you mean 'resv'"),
        ({"frame_retrieval_options": {"ratio": 2.0}}, "between 0 and 1, not 2"),
        ({"frame_retrieval_options": {"share": 0.5}}, "frame_retrieval 'resv': .*'share'"),
        ({"frame_retrieval_options": {"ratio": [0.5]}}, "frame_retrieval 'resv': .*'list'"),
    ],
)
def test_what_cannot_be_served_is_refused(make_engine, reading, change, says) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match=says):
        engine.admit(reading(**change))


def test_a_policy_is_built_once_for_equal_settings() -> None:
    spec = MemorySpec(frame_retrieval="resv", frame_retrieval_options={"ratio": 0.2})
    assert make_frame_retrieval(spec) is make_frame_retrieval(dataclasses.replace(spec, cap_bytes=2**26))
    other = dataclasses.replace(spec, frame_retrieval_options={"ratio": 0.4})
    assert make_frame_retrieval(other) == ReSVFrames(ratio=0.4)


def test_frames_that_attend_apart_read_the_same(make_engine, make_camera, reading, monkeypatch) -> None:
    samples = [make_camera().sample(number) for number in range(20)]
    found = []
    for pairs in (2**20, 1):
        monkeypatch.setattr("cluster.engine.native.frame_retrieval._PAIRS", pairs)
        engine = make_engine()
        options = {"ratio": 0.3, "deadline_s": 60.0}
        engine.admit(reading(block_frames=1, refresh="all", frame_retrieval_options=options))
        found.append((scores(watch(engine, samples)), reads(engine)))
    (together, first), (apart, second) = found
    assert apart == pytest.approx(together, abs=1e-5)
    assert first.frames == second.frames > 1
    assert first.read_tokens == second.read_tokens < first.held_tokens


def test_an_engine_without_memories_refuses(engine, reading) -> None:
    with pytest.raises(ConfigError, match="cam: frame_retrieval reads a memory, and this engine keeps none"):
        engine.admit(reading())
