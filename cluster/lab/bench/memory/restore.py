"""A camera taken up by a new engine: what the tiers hold of it, against computing its frames again.

One engine watches a clip, answers some questions, and saves window and memory into tiers that outlive it. Another
engine takes the camera up from there; a third one is given all frames once more. The second one is then asked the same
as the first.
"""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cluster.engine.native.engine import NativeEngine
from cluster.lab.bench.harness import BenchResult, print_progress
from cluster.lab.bench.memory.footage import CAMERA, QUESTIONS, Footage
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.types import AskSpec, FrameSample, MemorySpec, StreamSpec

_ROOM = 2**29
_ROUNDS = 3


def measure(footage: Footage) -> BenchResult:
    """Figure ``restore_speedup``: of the clip where it is smaller."""
    args = footage.args
    model = footage.model(args.model)
    rows: list[dict[str, Any]] = []
    for clip, samples in footage.samples(args.model):
        rows.append(measure_restore(model, footage.spec(MemorySpec()), clip, samples, args.repeats))
        print_progress(f"restore: {clip}")
    note = (
        "restored: admitting the camera, window and memory from the tiers; computed: all its frames through tower, "
        "language model and memory; logit_diff: largest of a question's first token, restored against never gone"
    )
    return BenchResult({"restore_speedup": min(row["speedup"] for row in rows)}, rows, [note])


def measure_restore(
    model: VisionLanguageModel, spec: StreamSpec, clip: str, samples: Sequence[FrameSample], repeats: int
) -> dict[str, Any]:
    """One row of the table."""
    tiers = TierStack([Arena(_ROOM)])
    first = NativeEngine(model, memories=MemoryBank(tiers))
    _watch(first, spec, samples)
    # Saving puts frames that wait into clusters, and questions split some: both are over before what is compared.
    first.memories.save_stream(CAMERA)  # type: ignore[union-attr]
    for _ in range(_ROUNDS):
        wanted = _ask(first)
    first.memories.save_stream(CAMERA)  # type: ignore[union-attr]
    restored_s = []
    for _ in range(repeats):
        again = NativeEngine(model, memories=MemoryBank(tiers))
        began = time.perf_counter()
        again.admit(spec)
        restored_s.append(time.perf_counter() - began)
    restored = sorted(restored_s)[repeats // 2]
    anew = NativeEngine(model, memories=MemoryBank(TierStack([Arena(_ROOM)])))
    began = time.perf_counter()
    _watch(anew, spec, samples)
    computed = time.perf_counter() - began
    status = again.memory_status(CAMERA)
    found = _ask(again)
    return {
        "clip": clip,
        "frames": len(samples),
        "frames_remembered": status.frames,
        "memory_kib": round(sum(tiers.usage(CAMERA).values()) / 2**10),
        "window_kib": round(again.memory_bytes(CAMERA) / 2**10),
        "restored_ms": restored * 1000,
        "computed_ms": computed * 1000,
        "speedup": computed / restored,
        "logit_diff": max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)),
        "same_answers": all(int(a.argmax()) == int(b.argmax()) for a, b in zip(found, wanted, strict=True)),
    }


def _watch(engine: NativeEngine, spec: StreamSpec, samples: Sequence[FrameSample]) -> None:
    engine.admit(spec)
    for sample in samples:
        for request in engine.push(sample):
            engine.step([request])


def _ask(engine: NativeEngine) -> list[Tensor]:
    """Logits of the first token of each question's answer."""
    found = []
    for text in QUESTIONS:
        run = engine.ask(AskSpec(CAMERA, text, max_new_tokens=1))
        run.step()
        found.append(run.logits)
    return found
