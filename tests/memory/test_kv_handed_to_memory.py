"""What leaves a window is what was in it, once, in order."""

import pytest
import torch
from packed_rotary import rotate

from cluster.engine.native import NativeEngine
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.head_memory import KVChunk
from cluster.models import load_model
from cluster.types import Question, StreamSpec

SIDE = 112


@pytest.fixture(scope="module")
def left() -> tuple[NativeEngine, list[KVChunk], dict[int, tuple[torch.Tensor, ...]], dict[int, int]]:
    """An engine after some windows; what left; what the pool held of each frame just before; tokens of each frame."""
    torch.set_num_threads(1)
    model = load_model("demo-qwen2_5_vl", device="cpu", dtype="float32")
    chunks: list[KVChunk] = []
    engine = NativeEngine(model)
    engine._kv_sink = chunks.append
    camera = SyntheticCamera("cam", model.geometry, width=SIDE, height=SIDE, kept=0.3, seed=1)
    engine.admit(StreamSpec("cam", (Question("q", "Is there a car?"),), 6.0, 2.0, static_gate=False))
    held: dict[int, tuple[torch.Tensor, ...]] = {}
    sizes: dict[int, int] = {}
    for number in range(16):
        sample = camera.sample(number)
        sizes[sample.index] = sample.tokens
        for request in engine.push(sample):
            engine.step([request])
            held.update(_held(engine))
    return engine, chunks, held, sizes


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
    _, chunks, held, _ = left
    for chunk in chunks:
        key, value, cos, sin = held[chunk.index]
        raw, stored = (part.flatten(0, 1).transpose(0, 1) for part in (chunk.key, key))
        torch.testing.assert_close(rotate(raw, cos, sin), stored, rtol=1e-5, atol=1e-5)
        assert torch.equal(chunk.value, value)
        assert int(chunk.cell.max()) < (SIDE // 28) ** 2
        assert chunk.columns == SIDE // 28
        assert len(chunk.key) == len(key)


def test_a_stream_that_begins_afresh_hands_on_what_it_held(left) -> None:
    engine, chunks, _, _ = left
    before = len(chunks)
    with_kv = [frame.index for frame in engine._streams["cam"].frames if frame.has_kv]
    assert with_kv
    engine._streams["cam"].reset()
    assert [chunk.index for chunk in chunks[before:]] == with_kv
