"""Frames that read their camera's past: with everything retrieved, a sliding window is causal attention over the whole
stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dense_oracle import DenseOracle, tokens_of
from window_driver import FAMILIES, TOLERANCE, Driver, Recorded, camera_of, covering_cases, spec_of, take

from cluster.engine.native import NativeEngine
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.registry import refresh_policies
from cluster.types import FrameSample, MemorySpec, StreamSpec

FRAMES = 22


def everything(**options: Any) -> MemorySpec:
    """A memory that evicts nothing, of which frames read all."""
    standard: dict[str, Any] = {
        "compressor": "none",
        "block_frames": 3,
        "frame_retrieval": "resv",
        "kv_dtype": "model",
    }
    return MemorySpec(**{**standard, "frame_retrieval_options": {"ratio": 1.0, "deadline_s": 60.0}, **options})


def driver_of(model: VisionLanguageModel, spec: StreamSpec, **options: Any) -> Driver:
    driver = Driver(NativeEngine(model, memories=MemoryBank(TierStack([Arena(64 * 2**20)])), **options))
    driver.engine.admit(spec)
    return driver


def run(driver: Driver, samples: Sequence[FrameSample], *, ahead: bool = False) -> list[Recorded]:
    """A frame at a time: as fast as they can be made, a busy machine would drop what its memory has no time for."""
    records = []
    for sample in samples:
        records += driver.run([sample], ahead=ahead)
        assert driver.engine.memories.wait_written()
    return records


def whole_stream(model: VisionLanguageModel, samples: Sequence[FrameSample]) -> DenseOracle:
    """Raw KV of every frame, all of which see all that came before: one dense causal pass in plain torch."""
    oracle = DenseOracle(model)
    tokens = sum(len(tokens_of(model, sample)) for sample in samples)
    oracle.window(samples, np.ones(tokens, dtype=bool), [spec_of().questions[0].text])
    return oracle


def held_kv(driver: Driver) -> dict[int, torch.Tensor]:
    """Of the window's frames, as in the oracle: raw ``[2, L, t, Hkv, d]``."""
    stream = driver.engine._streams["cam"]
    frames = [frame for frame in stream.frames if frame.has_kv]
    found, first = {}, 0
    for frame in frames:
        if len(frame.tokens):
            stop = first + len(frame.tokens)
            found[frame.index] = torch.stack(stream.kv.raw(frame.positions, first, stop)).transpose(2, 3)
            first = stop
    return found


@pytest.mark.parametrize(
    ("model", "camera", "run_as"),
    covering_cases([("all", False), ("none", True), ("anchors", True)]),
    indirect=["model", "camera"],
)
def test_with_everything_retrieved_frames_see_the_whole_stream(
    model: VisionLanguageModel, camera: SyntheticCamera, run_as: tuple[str, bool]
) -> None:
    """For every pair of a family, a pruning and how it is refreshed: by which policy, and whether ahead."""
    policy, ahead = run_as
    samples = take(camera, FRAMES)
    driver = driver_of(model, spec_of(refresh=policy, memory=everything()))
    records = run(driver, samples, ahead=ahead)
    reference = whole_stream(model, samples)
    slid = [record for record in records if record.request.start > 0]
    assert len(slid) == 7
    last = slid[-1]
    assert last.plan.frames[0].index >= 12
    assert last.stats.reads.unavailable == last.stats.reads.lost == 0
    assert 0 < last.stats.reads.read_tokens == last.stats.reads.held_tokens
    # KV of every layer but the first has seen what is retrieved.
    held = held_kv(driver)
    assert len(held) >= 2
    for index, kv in held.items():
        torch.testing.assert_close(kv, reference.kv[index], **TOLERANCE)
    # Questions see the window: frames that have seen the past.
    inside = [sample for sample in samples if sample.index in {frame.index for frame in last.plan.frames}]
    asking = DenseOracle(model, kv={sample.index: reference.kv[sample.index] for sample in inside})
    nothing = np.zeros(sum(len(tokens_of(model, sample)) for sample in inside), dtype=bool)
    [logits] = asking.window(inside, nothing, [spec_of().questions[0].text])
    torch.testing.assert_close(last.logits[0], logits, **TOLERANCE)


def test_without_the_policy_frames_do_not_see_it(model: VisionLanguageModel) -> None:
    """What the test above compares depends on the past."""
    samples = take(camera_of(model, kept=1.0), FRAMES)
    driver = driver_of(model, spec_of(refresh="none", memory=everything(frame_retrieval=None)))
    records = run(driver, samples)
    assert records[-1].stats.reads.frames == 0
    reference = whole_stream(model, samples)
    index, kv = list(held_kv(driver).items())[-1]
    assert not torch.allclose(kv, reference.kv[index], rtol=1e-2, atol=1e-2)


POLICIES = refresh_policies.names()


@pytest.mark.parametrize(
    ("model", "policy"),
    [(FAMILIES[(number + more) % len(FAMILIES)], policy) for number, policy in enumerate(POLICIES) for more in (0, 3)],
    indirect=["model"],
)
def test_every_refresh_policy_serves(model: VisionLanguageModel, policy: str) -> None:
    """In two families; the conformance matrix has every policy in every family, without reading the past."""
    samples = take(camera_of(model, kept=0.5), FRAMES)
    reference = whole_stream(model, samples)
    budget = 0.4 if refresh_policies.get(policy).budgeted else None
    driver = driver_of(model, spec_of(refresh=policy, refresh_budget=budget, memory=everything()))
    run(driver, samples)
    for index, kv in held_kv(driver).items():
        torch.testing.assert_close(kv, reference.kv[index], **TOLERANCE)
