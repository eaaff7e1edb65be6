"""Step times of an engine whose cameras' memories are at their cap, against one without memories.

The model has the KV shape of a 7B model (28 layers of 4 key heads of 128, bfloat16) but is narrow, so that two cores
can step it. Frames arrive in real time; memories are in host memory and a node tier in another process.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.engine.native import NativeEngine
from cluster.errors import SightlineError
from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.node import far_tier
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.types import MemorySpec, Question, StreamSpec

MODEL = "kv7b-qwen2_5_vl"
CAMERAS = 2
WINDOW_S, STRIDE_S = 16.0, 2.0
STEPS = 60
CAP = 32 * 2**20
FILL_S = 120.0
QUESTION = Question("q", "Is anyone climbing the fence?")


class Cameras:
    """An engine and its cameras, each of which sends a stride of frames at a time."""

    def __init__(self, model: VisionLanguageModel, bank: MemoryBank | None, seed: int) -> None:
        self.engine = NativeEngine(model, memories=bank)
        memory = None if bank is None else MemorySpec(cap_bytes=CAP)
        self.cameras = [
            SyntheticCamera(f"camera {number}", model.geometry, fps=2.0, kept=1.0, anchor_every=8, seed=seed + number)
            for number in range(CAMERAS)
        ]
        self.sent = [0] * CAMERAS
        for camera in self.cameras:
            spec = StreamSpec(camera.stream, (QUESTION,), WINDOW_S, STRIDE_S, static_gate=False, memory=memory)
            self.engine.admit(spec)

    def stride(self, number: int) -> float:
        """Seconds of the engine thread for one camera's next stride: pushing frames and stepping the window."""
        camera, spent = self.cameras[number], 0.0
        frames = round(STRIDE_S * 2.0 / camera.geometry.temporal)
        for index in range(self.sent[number], self.sent[number] + frames):
            sample = camera.sample(index)
            began = time.perf_counter()
            self.engine.step(self.engine.push(sample))
            spent += time.perf_counter() - began
        self.sent[number] += frames
        return spent

    def at_pace(self, steps: int) -> list[float]:
        """Run ``steps`` strides of the cameras in turn, each when due; returns their seconds."""
        spent, due = [], time.monotonic()
        for step in range(steps):
            due += STRIDE_S / CAMERAS
            spent.append(self.stride(step % CAMERAS))
            time.sleep(max(0.0, due - time.monotonic()))
        return spent


def measure(seed: int) -> BenchResult:
    """Figure ``step_p90_ratio``: ratio of the 90th percentiles, exceeded by 6 of 60 steps. Half of the steps without
    memories run before those with memories, half after."""
    model = load_model(MODEL, dtype="bfloat16")
    with far_tier(2 * CAMERAS * CAP) as node:
        bank = MemoryBank(TierStack([Arena(CAMERAS * CAP), node]))
        full, bare = Cameras(model, bank, seed), Cameras(model, None, seed)
        filled = _fill(full, bank)
        for number in range(CAMERAS):
            bare.stride(number)
        without = bare.at_pace(STEPS // 2)
        counts = [bank.get_memory(name)[0].counts for name in bank.streams()]
        before = sum(each.compressions for each in counts)
        with_memories = full.at_pace(STEPS)
        done = sum(each.compressions for each in counts) - before
        bank.wait_written(FILL_S)
        without += bare.at_pace(STEPS // 2)
        dropped = sum(each.frames_dropped for each in counts)
    rows = [_row("without memories", without), _row("memories at their cap", with_memories)]
    ratio = rows[1]["p90_ms"] / rows[0]["p90_ms"]
    notes = [
        f"{CAMERAS} cameras with {CAP >> 20} MiB each, full after {filled:.0f} s; while steps were timed "
        f"there were {done} compressions, and {dropped} frames were dropped"
    ]
    return BenchResult({"step_p90_ratio": ratio}, rows, notes)


def _fill(cameras: Cameras, bank: MemoryBank) -> float:
    """Run strides at full speed until every memory was compressed; returns the seconds taken."""
    began = time.monotonic()
    while not all(bank.get_memory(name)[0].counts.compressions for name in bank.streams()):
        if time.monotonic() - began > FILL_S:
            raise SightlineError(f"the memories are not full after {FILL_S:g} s")
        for number in range(CAMERAS):
            cameras.stride(number)
        bank.wait_written(FILL_S)
    return time.monotonic() - began


def _row(what: str, seconds: Sequence[float]) -> dict[str, Any]:
    ms = np.array(seconds) * 1000
    return {
        "steps of": what,
        "steps": len(ms),
        "mean_ms": float(ms.mean()),
        "p50_ms": float(np.percentile(ms, 50)),
        "p90_ms": float(np.percentile(ms, 90)),
        "worst_ms": float(ms.max()),
    }
