"""What leaves a window is what was in it, once, in order."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from packed_rotary import rotate

from cluster.engine.native import NativeEngine
from cluster.engine.window.kv import StreamKV
from cluster.errors import DeviceError, NotFiniteError
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.loading import load_model
from cluster.types import Answer, MemorySpec, Question, StreamSpec

SIDE = 112


@pytest.fixture(scope="module")
def left() -> tuple[NativeEngine, list[KVChunk], dict[int, tuple[torch.Tensor, ...]], dict[int, int]]:
    """An engine after some windows; what left; what the pool held of each frame just before; tokens of each frame."""
    torch.set_num_threads(1)
    engine = NativeEngine(load_model("demo-qwen2_5_vl", device="cpu", dtype="float32"))
    return engine, *_windows(engine)


def _windows(
    engine: NativeEngine,
) -> tuple[list[KVChunk], dict[int, tuple[torch.Tensor, ...]], dict[int, int]]:
    chunks: list[KVChunk] = []
    engine._kv_sink = chunks.append
    camera = SyntheticCamera("cam", engine.model.geometry, width=SIDE, height=SIDE, kept=0.3, seed=1)
    engine.admit(_spec())
    held: dict[int, tuple[torch.Tensor, ...]] = {}
    sizes: dict[int, int] = {}
    for number in range(16):
        sample = camera.sample(number)
        sizes[sample.index] = sample.tokens
        for request in engine.push(sample):
            engine.step([request])
            held.update(_held(engine))
    return chunks, held, sizes


def _spec(**options: Any) -> StreamSpec:
    standard: dict[str, Any] = {"static_gate": False, "memory": MemorySpec()}
    return StreamSpec("cam", (Question("q", "Is there a car?"),), 6.0, 2.0, **standard | options)


def _held(engine: NativeEngine) -> dict[int, tuple[torch.Tensor, ...]]:
    stream = engine._streams["cam"]
    found, first = {}, 0
    for frame in stream.frames:
        if frame.has_kv:
            stop = first + frame.size
            # Rotated at its place in the stream's own time: two temporal positions a frame of a second.
            key, value = stream.kv.stored(first, stop)
            assert frame.positions[0].eq(2 * frame.index).all()
            cos, sin = engine.model.rotary(frame.positions)
            found[frame.index] = (key, value, cos, sin)
            first = stop
    return found


def test_every_frame_leaves_once_and_in_order(left) -> None:
    engine, chunks, _, sizes = left
    indices = [chunk.index for chunk in chunks]
    assert indices == sorted(set(indices))
    assert len(indices) > 3
    assert [chunk.pts for chunk in chunks] == sorted(chunk.pts for chunk in chunks)
    still = {frame.index for frame in engine._streams["cam"].frames}
    assert set(indices) | still == set(sizes)
    assert all(chunk.tokens == sizes[chunk.index] for chunk in chunks)


def test_it_is_what_the_window_held(left) -> None:
    engine, chunks, held, _ = left
    biases = torch.stack([layer.self_attn.k_proj.bias for layer in engine.model.layers])
    for chunk in chunks:
        key, value, cos, sin = held[chunk.index]
        raw = chunk.key + biases.view(*chunk.key.shape[:2], 1, -1)
        raw, stored = (part.flatten(0, 1).transpose(0, 1) for part in (raw, key))
        torch.testing.assert_close(rotate(raw, cos, sin), stored, rtol=1e-5, atol=1e-5)
        assert torch.equal(chunk.value, value)
        assert int(chunk.cell.max()) < (SIDE // 28) ** 2
        assert chunk.columns == SIDE // 28
        assert len(chunk.key) == len(key)


def test_a_bias_of_keys_that_outweighs_them_does_not_reach_the_memory() -> None:
    """That of published checkpoints does: all tokens would be one cluster."""
    keys = []
    for factor in (1.0, 300.0):
        model = load_model("tiny-qwen2_5_vl")
        for layer in model.layers:
            layer.self_attn.k_proj.bias.mul_(factor)
        chunks = _windows(NativeEngine(model))[0]
        keys.append(torch.cat([chunk.key[0] for chunk in chunks], dim=1))
    # Only the first layer's keys do not depend on attention, which the bias changes.
    torch.testing.assert_close(keys[1], keys[0], rtol=0, atol=1e-4)


def test_a_stream_that_begins_afresh_hands_on_what_it_held(left) -> None:
    engine, chunks, _, _ = left
    before = len(chunks)
    with_kv = [frame.index for frame in engine._streams["cam"].frames if frame.has_kv]
    assert with_kv
    engine._streams["cam"].reset()
    assert [chunk.index for chunk in chunks[before:]] == with_kv


# -- failures ---------------------------------------------------------------------------------------
Run = Callable[[int, int], list[Answer]]


@pytest.fixture
def remembering() -> tuple[NativeEngine, MemoryBank, Run]:
    """An engine with memories and a camera; pushes frames of it and answers their windows."""
    model = load_model("tiny-qwen2_5_vl")
    bank = MemoryBank(TierStack([Arena(2**22)]))
    engine = NativeEngine(model, memories=bank)
    engine.admit(_spec())
    camera = SyntheticCamera("cam", model.geometry, width=SIDE, height=SIDE, kept=0.3, seed=1)

    def run(first: int, stop: int) -> list[Answer]:
        requests = (request for number in range(first, stop) for request in engine.push(camera.sample(number)))
        return [answer for request in requests for answer in engine.step([request])]

    return engine, bank, run


def test_a_frame_that_cannot_be_handed_on_is_lost_to_the_memory_alone(remembering, monkeypatch, caplog) -> None:
    engine, bank, run = remembering
    run(0, 12)
    counts = bank.get_memory("cam")[0].counts
    assert counts.frames_dropped == 0

    def fail(*_) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(StreamKV, "raw", fail)
    before = counts.frames
    assert [answer.window for answer in run(12, 24)] == [6, 7, 8, 9, 10, 11]
    assert counts.frames_dropped > 1
    assert caplog.text.count("is not remembered") == 1
    dropped, held = counts.frames_dropped, len(engine._streams["cam"].frames)
    engine.evict("cam")
    assert dropped < counts.frames_dropped <= dropped + held
    assert counts.frames == before
    assert engine.pool.used == 0


def test_a_lost_gpu_is_told_where_a_frame_is_handed_on(remembering, monkeypatch) -> None:
    """A replica of quiet cameras refused their frames for ever, as it learned of lost GPUs in steps alone."""
    engine, _, run = remembering
    run(0, 12)

    def fail(*_, **__) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(StreamKV, "raw", fail)
    fresh = replace(SyntheticCamera("cam", engine.geometry, width=SIDE, height=SIDE).sample(12), fresh=True)
    for call in (lambda: run(12, 24), lambda: engine.push(fresh), lambda: engine.evict("cam")):
        with pytest.raises(DeviceError):
            call()


def test_a_memory_that_cannot_be_saved_costs_no_answer(remembering, monkeypatch, caplog) -> None:
    _, bank, run = remembering

    def fail() -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(bank, "schedule_saves", fail)
    assert len(run(0, 4)) == 2
    assert "could not be saved" in caplog.text


def test_kv_that_a_failed_pass_has_written_over_is_not_remembered(remembering) -> None:
    engine, bank, run = remembering
    run(0, 12)
    stream, memory = engine._streams["cam"], bank.get_memory("cam")[0]
    first, second = (frame for frame in stream.frames[:2] if frame.size)
    before = memory.counts.frames
    wrong = torch.zeros(first.size + second.size, dtype=torch.bool).numpy()
    wrong[0] = True
    stream.invalidate_tokens(stream.frames[:2], wrong)
    expected = stream.kv.raw(second.positions, first.size, first.size + second.size, bias=False)
    stream.drop_frames(2)
    assert (memory.counts.frames - before, memory.counts.frames_dropped) == (1, 1)
    assert torch.equal(memory.recent[-1].key, expected[0])


def test_what_is_no_number_ahead_of_a_window_is_not_remembered(remembering, monkeypatch) -> None:
    """Means of clusters would be none either, and a question would read none of them until they are forgotten."""
    engine, bank, run = remembering
    run(0, 12)
    engine.ahead_rows = 1, 1000
    camera = SyntheticCamera("cam", engine.geometry, width=SIDE, height=SIDE, kept=0.3, seed=1)
    with monkeypatch.context() as patch:
        real = engine.model.run_layer
        patch.setattr(engine.model, "run_layer", lambda index, hidden, *step: real(index, hidden, *step) * math.nan)
        assert engine.push(camera.sample(12)) == []
        assert engine.prefill_ahead()
    with pytest.raises(NotFiniteError):
        run(13, 14)
    memory = bank.get_memory("cam")[0]
    dropped, remembered = memory.counts.frames_dropped, memory.counts.frames
    chunks: list[KVChunk] = []
    engine._streams["cam"].kv_sink = chunks.append
    held = len(engine._streams["cam"].frames)
    engine._streams["cam"].reset()
    assert all(bool(part.isfinite().all()) for chunk in chunks for part in (chunk.key, chunk.value))
    # The others of its window are numbers.
    assert 0 < len(chunks) < held
    assert (memory.counts.frames_dropped - dropped, memory.counts.frames) == (held - len(chunks) - 1, remembered)


def test_a_window_that_is_not_handed_over_is_remembered(remembering) -> None:
    """One tier, so that no other process would find it; a window above an eighth of the cap is as little saved."""
    engine, bank, run = remembering
    run(0, 12)
    seen = engine._streams["cam"].frames[-1].memory_time
    assert not engine.hand_over("cam").result(60.0)
    assert bank.get_memory("cam")[0].newest == seen


def test_nothing_is_gathered_for_a_camera_without_a_memory(remembering, monkeypatch) -> None:
    engine, _, run = remembering
    engine.admit(_spec(memory=None))
    monkeypatch.setattr(StreamKV, "raw", lambda *_: 1 / 0)
    assert len(run(0, 24)) == 12


def test_a_frame_longer_than_its_windows_is_there_when_its_time_is_told(remembering) -> None:
    engine, _, _ = remembering
    engine.admit(replace(_spec(), window_s=60.0, stride_s=60.0))
    camera = SyntheticCamera("cam", engine.geometry, width=SIDE, height=SIDE, fps=0.02)
    for number in range(6):
        engine.push(camera.sample(number))
        (*_, newest) = engine._streams["cam"].frames
        assert (newest.index, newest.memory_time) == (number, number * 100_000_000)
