"""Windows in host memory: who is moved, what stays whole there, and what it counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cluster.engine.native import NativeEngine
from cluster.engine.window.host_copies import HostCopies, HostCopy
from cluster.engine.window.kv import KVPool, StreamKV
from cluster.errors import CapacityError
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.loading import load_model, load_truncated
from cluster.models.presets import PRESETS
from cluster.models.upload import to_device
from cluster.types import MemorySpec


@pytest.fixture
def offloading(model) -> NativeEngine:
    engine = NativeEngine(model, host_kv_bytes=2**30)
    engine.pool.block_tokens = 7
    return engine


def test_copied_windows_are_moved_first_and_then_those_that_end_last(offloading, make_camera, make_spec, run) -> None:
    # After ten seconds their next windows end in two, five and two.
    for name, stride_s in (("a", 3.0), ("b", 5.0), ("c", 4.0)):
        offloading.admit(make_spec(name, stride_s=stride_s))
        run(offloading, [make_camera(stream=name).sample(index) for index in range(10)])
    held = {name: offloading._streams[name].kv for name in "abc"}
    used, slots = offloading.pool.used, len(held["b"])
    offloading.pool.make_room(1)
    assert [kv.on_host for kv in held.values()] == [False, True, False]
    assert offloading.pool.used == used - slots
    assert offloading.pool.host_used == slots * offloading.pool.slot_bytes
    held["c"].copy_to_host()
    offloading.pool.make_room(1)
    assert [kv.on_host for kv in held.values()] == [False, True, True]
    offloading.pool.make_room(1)
    assert [kv.on_host for kv in held.values()] == [True, True, True]
    assert offloading.pool.used == 0
    for name in "abc":
        offloading.evict(name)
    assert offloading.pool.host_used == 0


def test_a_due_window_is_moved_last(offloading, make_camera, make_spec, run) -> None:
    for name in ("due", "idle"):
        offloading.admit(make_spec(name))
        run(offloading, [make_camera(stream=name).sample(index) for index in range(9)])
    # Its next window ends two seconds later than the other's.
    assert offloading.push(make_camera(stream="due").sample(9))
    offloading.pool.make_room(1)
    assert [offloading._streams[name].kv.on_host for name in ("due", "idle")] == [False, True]


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
        engine.pool.block_tokens = 7
        engine._kv_sink = sink.append
        engine.admit(make_spec(memory=MemorySpec()))
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


class Landing:
    """A copy to host memory that the device may wait for, and whose data is there once the host has waited."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = [tensor.cpu() for tensor in tensors]
        self.held = tuple(torch.full_like(tensor, math.nan) for tensor in self.tensors)

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        for held, tensor in zip(self.held, self.tensors, strict=True):
            held.copy_(tensor)

    @property
    def read(self) -> bool:
        return not any(bool(held.isnan().any()) for held in self.held)


@pytest.fixture
def parked(make_camera, make_spec, run, monkeypatch):
    """An engine on a GPU with a camera in host memory; a camera and copies, of which the first has its embeddings."""
    landings: list[Landing] = []

    def to_host(_copies: HostCopies, tensors: list[torch.Tensor]) -> HostCopy:
        landings.append(Landing(tensors))
        return HostCopy(landings[-1].held, landings[-1])

    monkeypatch.setattr(HostCopies, "to_host", to_host)
    # Each operation on a fake GPU is one of Python's.
    preset = PRESETS["tiny-qwen2_5_vl"]
    tower = preset.vision | {"depth": 1, "fullatt_block_indexes": [0]}
    few = replace(preset, text=preset.text | {"num_hidden_layers": 1}, vision=tower)
    monkeypatch.setitem(PRESETS, "tiny-qwen2_5_vl", few)
    with FakeCuda():
        engine = NativeEngine(load_model("tiny-qwen2_5_vl", device="cuda:0"), kv_bytes=2**24, host_kv_bytes=2**30)
        engine.admit(make_spec(refresh="all", memory=MemorySpec()))
        camera = make_camera()
        run(engine, [camera.sample(index) for index in range(10)])
        engine.pool.make_room(engine.pool.capacity)
        assert engine._streams["cam"].kv.on_host
        yield engine, camera, landings


def test_embeddings_in_host_memory_are_read_after_their_copy(parked, run) -> None:
    engine, camera, landings = parked
    embeddings = landings[0]
    assert not embeddings.read
    # The device's wait for the window's KV is none of the host's for them.
    engine._streams["cam"].kv.load()
    assert not embeddings.read
    run(engine, [camera.sample(10), camera.sample(11)])
    assert embeddings.read


def test_embeddings_in_host_memory_are_exported_after_their_copy(parked) -> None:
    engine, _, landings = parked
    state = engine._snapshot("cam")
    held = [tensor for name, tensor in state.tensors.items() if name.endswith("embeds")]
    assert torch.equal(torch.cat(held), landings[0].tensors[0])


def test_embeddings_in_host_memory_leave_for_a_memory_after_their_copy(parked) -> None:
    engine, _, landings = parked
    stream = engine._streams["cam"]
    stream.kv_sink = lambda _: None
    stream.drop_frames(1)
    assert landings[0].read


def test_embeddings_in_host_memory_count(parked, make_camera, make_spec, run) -> None:
    engine, _, landings = parked
    stream = engine._streams["cam"]
    assert stream.moved_nbytes / 2 < landings[0].held[0].nbytes <= stream.moved_nbytes
    # What admission counts on fits.
    engine.pool.host_capacity = engine.pool.host_used + stream.moved_nbytes
    assert engine.window_tokens >= engine.pool.capacity + len(stream.kv)
    engine.admit(make_spec("other"))
    run(engine, [make_camera(stream="other").sample(index) for index in range(10)])
    other = engine._streams["other"]
    # Room for the other's KV, but not for its embeddings.
    room = stream.moved_nbytes + other.device_nbytes
    engine.pool.host_capacity = engine.pool.host_used + room - 1
    engine.pool.make_room(engine.pool.capacity)
    assert not other.kv.copied
    engine.pool.host_capacity += 1
    engine.pool.make_room(engine.pool.capacity)
    assert other.kv.on_host
    # Host memory is there as a whole until nothing has a part of it.
    moved, used = stream.moved_nbytes, engine.pool.host_used
    stream.kv_sink = lambda _: None
    stream.drop_frames(len(stream.frames) - 1)
    assert (stream.moved_nbytes, engine.pool.host_used) == (moved, used)
    stream.drop_frames(1)
    assert (stream.moved_nbytes, engine.pool.host_used) == (0, other.kv._host.nbytes)


def test_a_full_device_leaves_a_window_in_host_memory_until_there_is_room(
    offloading, make_camera, make_spec, run, monkeypatch
) -> None:
    camera, pool = make_camera(), offloading.pool
    offloading.admit(make_spec())
    run(offloading, [camera.sample(index) for index in range(10)])
    kv = offloading._streams["cam"].kv
    k, v = kv.stored()
    pool.make_room(pool.capacity)
    room: list[int] = []
    real = to_device

    def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        # Keys come, and values do not.
        if tensor.ndim == 4 and not (room and room.pop()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(tensor, device)

    monkeypatch.setattr("cluster.engine.window.kv.to_device", upload)
    room += [1]
    (request,) = offloading.push(camera.sample(10)) or offloading.push(camera.sample(11))
    with pytest.raises(torch.OutOfMemoryError):
        offloading.step([request])
    assert kv.on_host
    assert pool.used == 0
    assert all(map(torch.equal, kv.stored(), (k, v)))
    monkeypatch.undo()
    assert offloading.step([request])
    assert pool.used == len(kv) > 0


@pytest.mark.parametrize("error", [RuntimeError, torch.AcceleratorError])
def test_a_host_that_pins_no_more_memory_keeps_windows_in_the_pool(
    model, make_camera, make_spec, run, monkeypatch, caplog, error
) -> None:
    engine = NativeEngine(model, host_kv_bytes=2**30, idle_kv_share=0.0)

    def to_host(*_) -> HostCopy:
        raise error("CUDA error: out of memory")

    monkeypatch.setattr(HostCopies, "to_host", to_host)
    for name in ("a", "b"):
        engine.admit(make_spec(name))
        assert run(engine, [make_camera(stream=name).sample(index) for index in range(8)])
    settle(engine)
    engine.pool.make_room(1)
    assert [engine._streams[name].kv.copied for name in ("a", "b")] == [False, False]
    assert engine.pool.host_used == 0
    assert caplog.text.count("stay in the KV pool") == 1


def test_memories_have_an_eighth_of_the_host_unless_told(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.engine.window.kv.host_memory_bytes", lambda: 2**33)
    bank = MemoryBank(TierStack([Arena(2**20)]))
    assert NativeEngine(model, memories=bank).waiting_bytes == 2**30
    assert NativeEngine(model, memories=bank, waiting_bytes=2**21).waiting_bytes == 2**21
    assert NativeEngine(model).waiting_bytes == math.inf


def test_pinned_memory_is_taken_in_blocks_and_counts_as_torch_takes_it() -> None:
    """torch makes a power of two of each allocation: a window took up to twice what was counted."""
    with FakeCuda():
        pool = KVPool(load_truncated("qwen2_5_vl-7b", 2, DEVICE), 2**27)
        kv = StreamKV(pool)
        kv.resize(9000)
        kv.copy_to_host()
        assert kv._host is not None
        taken = HostCopy(kv._host.tensors(), object()).nbytes
    assert HostCopy((torch.zeros(5), torch.zeros(8)), object()).nbytes == 64
    assert kv.nbytes <= taken < 1.1 * kv.nbytes
