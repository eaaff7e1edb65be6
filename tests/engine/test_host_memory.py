"""Windows in host memory: who is moved, what stays whole there, and what it counts."""

from __future__ import annotations

import math

import pytest
import torch

from cluster.engine.native import NativeEngine
from cluster.engine.window.host_copies import HostCopies, HostCopy
from cluster.errors import CapacityError
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack


@pytest.fixture
def offloading(model) -> NativeEngine:
    return NativeEngine(model, host_kv_bytes=2**30)


def test_the_longest_unused_windows_are_moved_first(offloading, make_camera, make_spec, run) -> None:
    for name in ("a", "b", "c"):
        offloading.admit(make_spec(name))
        run(offloading, [make_camera(stream=name).sample(index) for index in range(10)])
    held = {name: offloading._streams[name].kv for name in "abc"}
    used, slots = offloading.pool.used, len(held["a"])
    offloading.pool.make_room(1)
    assert [kv.on_host for kv in held.values()] == [True, False, False]
    assert offloading.pool.used == used - slots
    assert offloading.pool.host_used == slots * offloading.pool.slot_bytes
    offloading.pool.make_room(len(held["b"]) + 1)
    assert [kv.on_host for kv in held.values()] == [True, True, True]
    assert offloading.pool.used == 0
    for name in "abc":
        offloading.evict(name)
    assert offloading.pool.host_used == 0


def test_a_window_comes_back_before_it_ends(offloading, make_camera, make_spec, run) -> None:
    offloading.admit(make_spec(window_s=16.0, stride_s=8.0))
    offloading.ahead_rows = 1, 1000
    camera = make_camera()
    run(offloading, [camera.sample(index) for index in range(16)])
    kv = offloading._streams["cam"].kv
    k, v = kv.stored()
    offloading.pool.make_room(offloading.pool.capacity)
    assert all(map(torch.equal, kv.stored(), (k, v)))
    for index in range(16, 22):
        assert offloading.push(camera.sample(index)) == []
        assert kv.on_host
        assert not offloading.prefill_ahead()
    # The next frame may end the window.
    assert offloading.push(camera.sample(22)) == []
    assert not kv.on_host
    assert (offloading.idle.loads, offloading.idle.loads_ahead) == (1, 1)
    assert offloading.pool.host_used == 0
    assert all(map(torch.equal, kv.stored(), (k, v)))
    assert offloading.prefill_ahead()
    assert offloading._streams["cam"].frames[-1].has_kv


def test_what_leaves_a_window_in_host_memory_is_remembered_as_from_the_pool(model, make_camera, make_spec, run) -> None:
    chunks: list[list[KVChunk]] = [[], []]
    for sink, moves in zip(chunks, (False, True), strict=True):
        engine = NativeEngine(model, host_kv_bytes=2**30)
        engine._kv_sink = sink.append
        engine.admit(make_spec())
        camera = make_camera()
        run(engine, [camera.sample(index) for index in range(10)])
        if moves:
            engine.pool.make_room(engine.pool.capacity)
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
    offloading.pool.make_room(offloading.pool.capacity)
    assert offloading.export_stream("cam") == state


def settle(engine: NativeEngine) -> None:
    while engine.prefill_ahead():
        pass


@pytest.mark.parametrize("ahead", [False, True])
def test_windows_wait_in_host_memory_between_strides_with_the_same_answers(
    model, make_camera, make_spec, ahead
) -> None:
    found = []
    for share in (0.0, 1.0):
        engine = NativeEngine(model, host_kv_bytes=2**30, idle_kv_share=share)
        engine.ahead_rows = 1, 1000
        for name in ("a", "b"):
            engine.admit(make_spec(name, window_s=16.0, stride_s=8.0, refresh="anchors"))
        cameras = [make_camera(stream=name, anchor_every=2) for name in ("a", "b")]
        answers = []
        for index in range(48):
            requests = [each for camera in cameras for each in engine.push(camera.sample(index))]
            answers += engine.step(requests)
            if ahead:
                settle(engine)
            if share == 0 and index % 8 == 4 and index > 8:
                assert [engine._streams[name].kv.on_host for name in ("a", "b")] == [True, True]
        found.append(answers)
        # Two cameras of six windows, of the first of which only work ahead has left anything before its end.
        loads = 0 if share else 12 if ahead else 10
        assert (engine.idle.loads, engine.idle.loads_ahead) == (loads, loads)
    moved, stayed = found
    # Rows are in other passes, which rounds differently.
    assert [answer.score for answer in moved] == pytest.approx([answer.score for answer in stayed], abs=1e-5)
    assert [answer.tokens for answer in moved] == [answer.tokens for answer in stayed]


def test_a_window_whose_answer_may_stand_is_not_loaded(model, make_camera, make_spec, run) -> None:
    engine = NativeEngine(model, host_kv_bytes=2**30, idle_kv_share=0.0)
    engine.admit(make_spec(stride_s=4.0, static_gate=True, max_idle_s=60.0))
    night = make_camera(still=True)
    for index in range(12):
        run(engine, [night.sample(index)])
        settle(engine)
    assert engine._streams["cam"].kv.on_host
    assert engine.idle.loads <= 2


class Event:
    """A copy that ends when it is told to."""

    ended = joined = False

    def query(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.joined = True


def test_slots_are_given_back_once_their_copy_is_done(model, make_camera, make_spec, run, monkeypatch) -> None:
    engine = NativeEngine(model, host_kv_bytes=2**30, idle_kv_share=0.0)
    events: list[Event] = []
    real = HostCopies.to_host

    def to_host(copies: HostCopies, tensors: list[torch.Tensor]) -> HostCopy:
        events.append(Event())
        return HostCopy(real(copies, tensors).tensors(), events[-1])

    monkeypatch.setattr(HostCopies, "to_host", to_host)
    engine.admit(make_spec(window_s=16.0, stride_s=4.0))
    camera = make_camera()
    run(engine, [camera.sample(index) for index in range(8)])
    kv = engine._streams["cam"].kv
    settle(engine)
    held = len(kv)
    assert (kv.copied, kv.on_host, engine.pool.used) == (True, False, held)
    # Not for a window that is needed before: what is in the pool is used, and written behind the copy.
    run(engine, [camera.sample(index) for index in range(8, 12)])
    assert (engine.idle.loads, engine.pool.host_used) == (0, 0)
    assert events[-1].joined
    settle(engine)
    assert kv.copied
    assert not kv.on_host
    events[-1].ended = True
    settle(engine)
    assert kv.on_host
    assert engine.pool.used == 0
    # Without its end, whoever needs the slots waits for it on the device.
    run(engine, [camera.sample(index) for index in range(12, 16)])
    settle(engine)
    assert not kv.on_host
    engine.pool.make_room(1)
    assert kv.on_host
    assert events[-1].joined


def test_memories_have_an_eighth_of_the_host_unless_told(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.engine.window.kv.host_memory_bytes", lambda: 2**33)
    bank = MemoryBank(TierStack([Arena(2**20)]))
    assert NativeEngine(model, memories=bank).index_bytes == 2**30
    assert NativeEngine(model, memories=bank, index_bytes=2**21).index_bytes == 2**21
    assert NativeEngine(model).index_bytes == math.inf
