"""A stream's state on the wire."""

import json
import pickle
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cluster.engine.native import NativeEngine
from cluster.engine.window import export
from cluster.errors import CapacityError, DeviceError, ModelError
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.loading import load_model


@pytest.fixture
def state(engine, make_camera, make_spec, run) -> bytes:
    engine.admit(make_spec())
    camera = make_camera(kept=0.3, empty=0.3)
    run(engine, [camera.sample(i) for i in range(13)])
    return engine.export_stream("cam")


def test_counters_windows_and_memory_travel(engine, model, state, make_spec) -> None:
    other = NativeEngine(model)
    other.import_stream(make_spec(), state)
    ours, theirs = engine._streams["cam"], other._streams["cam"]
    assert theirs.clock == ours.clock
    assert theirs.last == ours.last
    assert theirs.windows_since_fresh == ours.windows_since_fresh
    assert [f.index for f in theirs.frames] == [f.index for f in ours.frames]
    frames_only = [s.nbytes - s.kv.nbytes for s in (ours, theirs)]
    assert frames_only[0] == frames_only[1]
    assert len(theirs.kv) == len(ours.kv) > 0
    again = other.export_stream("cam")
    assert again == state


def test_a_gpu_is_waited_for_once(monkeypatch) -> None:
    """Each wait is for whatever it was given before. The fake GPU's data are there when they are copied."""
    log: list[str] = []
    to = torch.Tensor.to

    def copied(tensor, *given, **options):
        if tensor.device == DEVICE:
            log.append("copy" if options.get("non_blocking") else "copy and wait")
        return to(tensor, *given, **options)

    with FakeCuda():
        tensors = {name: torch.ones(2, 3).to(DEVICE) for name in ("k", "v", "0.embeds")}
        window = export.Snapshot({"version": export.VERSION}, {**tensors, "cells": torch.zeros(1)})
        monkeypatch.setattr(torch.Tensor, "to", copied)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: log.append("wait"))
        )
        assert window.dump()
    assert (set(log[:-1]), log[-1]) == ({"copy"}, "wait")


def test_a_window_that_ended_before_the_first_frame_here_is_not_answered_again(
    engine, model, state, make_camera, make_spec, run
) -> None:
    """The engine that was lost may have gone on after it had saved its windows."""
    camera = make_camera(kept=0.3, empty=0.3)
    assert [answer.end // 1_000_000 for answer in run(engine, [camera.sample(i) for i in range(13, 17)])] == [14, 16]
    other = NativeEngine(model)
    other.import_stream(make_spec(), state)
    frames = [replace(make_camera().sample(18), gap=True), *(camera.sample(i) for i in range(19, 22))]
    assert [(answer.window, answer.end // 1_000_000) for answer in run(other, frames)] == [(9, 20), (10, 22)]


def test_a_gated_answer_still_stands_after_a_move(engine, model, make_camera, make_spec, run) -> None:
    night, spec = make_camera(still=True), make_spec(static_gate=True)
    engine.admit(spec)
    before = run(engine, [night.sample(i) for i in range(6)])[-1]
    other = NativeEngine(model)
    other.import_stream(spec, engine.export_stream("cam"))
    after = run(other, [night.sample(i) for i in (6, 7)])[-1]
    assert after.gated
    assert after.score == before.score


def test_questions_and_lengths_of_the_new_spec_hold(model, state, make_camera, make_spec, run) -> None:
    other = NativeEngine(model)
    other.import_stream(make_spec(stride_s=4.0), state)
    answers = run(other, [make_camera(kept=0.3, empty=0.3).sample(i) for i in range(13, 20)])
    assert [answer.end // 1_000_000 for answer in answers] == [16, 20]


def test_another_model_is_refused(state, make_spec) -> None:
    for other in (load_model("tiny-qwen2_5_vl", seed=1), load_model("tiny-internvl3")):
        engine = NativeEngine(other)
        with pytest.raises(ModelError, match="another model"):
            engine.import_stream(make_spec(), state)
        assert engine.memory_bytes() == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: b"",
        lambda state: b"\xff" * 40,
        lambda state: state[: len(state) // 2],
        lambda state: state[:-7],
        lambda state: pickle.dumps({"k": 1}),
        lambda state: struct.pack("<Q", 2) + b"{}",
        lambda state: struct.pack("<Q", 2) + b"[]",
    ],
)
def test_damaged_states_are_refused_and_leave_the_engine_as_it_was(model, state, damage, make_spec) -> None:
    engine = NativeEngine(model)
    engine.admit(make_spec())
    with pytest.raises(ModelError):
        engine.import_stream(make_spec(), damage(state))
    assert engine._streams["cam"].frames == []


def test_a_state_that_does_not_fit_the_pool_leaves_the_camera_with_an_empty_window(
    engine, model, state, make_spec, caplog
) -> None:
    slots = len(engine._streams["cam"].kv)
    full = NativeEngine(model, kv_bytes=100 * engine.pool.slot_bytes)
    others = full.pool.allocate(101 - slots)
    assert full._admit(make_spec(), state)
    assert "starts with an empty window" in caplog.text
    with pytest.raises(CapacityError):
        full.import_stream(make_spec(), state)
    assert full._streams["cam"].frames == []
    assert full.pool.used == len(others)


def test_what_the_gpu_fails_with_is_not_the_states_fault(model, state, make_spec, monkeypatch, caplog) -> None:
    def fail(*_) -> None:
        raise errors.pop()

    errors = [torch.AcceleratorError("CUDA error"), torch.OutOfMemoryError("CUDA out of memory")]
    engine = NativeEngine(model, memories=MemoryBank(TierStack([Arena(2**20)])))
    monkeypatch.setattr(engine.memories, "open_stream", lambda *_: state)
    monkeypatch.setattr(export, "_fill", fail)
    engine.admit(make_spec())
    assert "starts with an empty window: cam: its saved window has no room: CUDA out of memory" in caplog.text
    engine.evict("cam")
    with pytest.raises(DeviceError, match="lost to this process"):
        engine.admit(make_spec())


def test_a_state_that_is_refused_gives_its_slots_back(model, state, make_spec) -> None:
    engine = NativeEngine(model)
    size = int.from_bytes(state[:8], "little")
    header = json.loads(state[8 : 8 + size])
    inner = json.loads(header["__metadata__"]["sightline"])
    for damage in ({"outstanding": [{"number": 1}]}, {"frames": inner["frames"][:2]}):
        header["__metadata__"]["sightline"] = json.dumps(inner | damage)
        encoded = json.dumps(header).encode()
        with pytest.raises(ModelError, match="damaged"):
            engine.import_stream(make_spec(), struct.pack("<Q", len(encoded)) + encoded + state[8 + size :])
        assert engine.pool.used == 0


def test_a_later_version_is_refused(model, state, make_spec) -> None:
    size = int.from_bytes(state[:8], "little")
    header = json.loads(state[8 : 8 + size])
    inner = json.loads(header["__metadata__"]["sightline"])
    header["__metadata__"]["sightline"] = json.dumps(inner | {"version": 99})
    encoded = json.dumps(header).encode()
    with pytest.raises(ModelError, match="version 99"):
        NativeEngine(model).import_stream(make_spec(), struct.pack("<Q", len(encoded)) + encoded + state[8 + size :])


def test_importing_replaces(engine, model, state, make_spec) -> None:
    other = NativeEngine(model)
    other.import_stream(make_spec(), state)
    other.import_stream(replace(make_spec(), refresh="all"), state)
    assert other._streams["cam"].spec.refresh == "all"
