"""Windows in host memory: who is moved, what stays whole there, and what it counts."""

from __future__ import annotations

import pytest
import torch

from cluster.engine.native import NativeEngine
from cluster.errors import CapacityError
from cluster.memory.head_memory import KVChunk


@pytest.fixture
def offloading(model) -> NativeEngine:
    return NativeEngine(model, host_kv_bytes=2**30)


def test_the_longest_unused_windows_are_moved_first(offloading, make_camera, make_spec, run) -> None:
    for name in ("a", "b", "c"):
        offloading.admit(make_spec(name))
        run(offloading, [make_camera(stream=name).sample(index) for index in range(10)])
    held = {name: offloading._streams[name].kv for name in "abc"}
    used, slots = offloading.pool.used, len(held["a"])
    offloading.make_room(1)
    assert [kv.on_host for kv in held.values()] == [True, False, False]
    assert offloading.pool.used == used - slots
    assert offloading.pool.host_used == slots * offloading.pool.slot_bytes
    offloading.make_room(len(held["b"]) + 1)
    assert [kv.on_host for kv in held.values()] == [True, True, True]
    assert offloading.pool.used == 0
    for name in "abc":
        offloading.evict(name)
    assert offloading.pool.host_used == 0


def test_a_window_comes_back_when_it_closes(offloading, make_camera, make_spec, run) -> None:
    offloading.admit(make_spec())
    camera = make_camera()
    run(offloading, [camera.sample(index) for index in range(10)])
    kv = offloading._streams["cam"].kv
    k, v = kv.stored()
    offloading.make_room(offloading.pool.capacity)
    assert all(map(torch.equal, kv.stored(), (k, v)))
    assert offloading.push(camera.sample(10)) == []
    assert kv.on_host
    assert not offloading.prefill_ahead()
    assert offloading.push(camera.sample(11))
    assert not kv.on_host
    assert offloading.pool.host_used == 0
    assert all(map(torch.equal, kv.stored(), (k, v)))


def test_what_leaves_a_window_in_host_memory_is_remembered_as_from_the_pool(model, make_camera, make_spec, run) -> None:
    chunks: list[list[KVChunk]] = [[], []]
    for sink, moves in zip(chunks, (False, True), strict=True):
        engine = NativeEngine(model, kv_sink=sink.append, host_kv_bytes=2**30)
        engine.admit(make_spec())
        camera = make_camera()
        run(engine, [camera.sample(index) for index in range(10)])
        if moves:
            engine.make_room(engine.pool.capacity)
        stream = engine._streams["cam"]
        stream.drop_frames(3)
        assert stream.kv.on_host is moves
        stream.reset()
        assert (engine.pool.used, engine.pool.host_used) == (0, 0)
    assert len(chunks[0]) == len(chunks[1]) > 6
    for stayed, moved in zip(*chunks, strict=True):
        assert torch.equal(stayed.key, moved.key)
        assert torch.equal(stayed.value, moved.value)
        assert torch.equal(stayed.mean_embedding, moved.mean_embedding)


def test_a_full_host_keeps_windows_in_the_pool_and_says_so(model, make_camera, make_spec, run) -> None:
    roomy = NativeEngine(model)
    engine = NativeEngine(model, kv_bytes=100 * roomy.pool.slot_bytes, host_kv_bytes=10 * roomy.pool.slot_bytes)
    for name in ("a", "b"):
        engine.admit(make_spec(name))
    run(engine, [make_camera(stream="a", kept=1.0).sample(index) for index in range(6)])
    with pytest.raises(CapacityError, match="of its 100 slots"):
        run(engine, [make_camera(stream="b", kept=1.0).sample(index) for index in range(6)])
    assert engine.pool.host_used == 0


def test_an_export_from_host_memory_equals_one_from_the_pool(offloading, make_camera, make_spec, run) -> None:
    offloading.admit(make_spec())
    run(offloading, [make_camera().sample(index) for index in range(10)])
    state = offloading.export_stream("cam")
    offloading.make_room(offloading.pool.capacity)
    assert offloading.export_stream("cam") == state
