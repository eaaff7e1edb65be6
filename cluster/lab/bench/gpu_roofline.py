"""Roofline prediction of the streams that a GPU can carry, from its peak numbers.

Production windows run on a fake device for their counts (rows, attended slots, encoded patches); the model's functions
count operations at its true depth. A stage takes the longer of its products at a share of peak FLOP/s and its memory
traffic: weights once per pass, keys and values once per block of rows. Other traffic (norms, activations) is covered by
the share. Video decoding and the host are left out.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cluster.config.memory import DEFAULT_TOKENS
from cluster.engine.native import NativeEngine
from cluster.engine.native.kernels.slots import TILES
from cluster.engine.native.passes import ahead_rows, pass_rows
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.kv import MEMORY_SHARE, MOST_SLOTS, gpu_pool_bytes
from cluster.engine.window.step import WindowStats
from cluster.engine.window.stream import StreamFrame
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.lab.bench.frames import made_clips, prune_clip, read_clip, span_seconds
from cluster.lab.bench.gpu_host import SPEC, STRIDE_S, WINDOW_S
from cluster.lab.planning.model_card import kv_token_bytes
from cluster.models.base import VisionLanguageModel
from cluster.models.checkpoint import head_size
from cluster.models.loading import load_shape, load_truncated
from cluster.types import MICROSECONDS, FrameSample, MemorySpec
from cluster.types.cameras import WAITING

PREFILL_MFU, TOWER_MFU = 0.60, 0.45
"""Target shares of peak FLOP/s; not measured."""
WINDOWS = 6


@dataclass(frozen=True, slots=True)
class Card:
    """Peak numbers from NVIDIA's data sheets, without sparsity, in FLOP/s, bytes/s and bytes; ``fp8``: 0 if not
    supported; ``pcie``: one way."""

    name: str
    bf16: float
    fp8: float
    bandwidth: float
    memory: float
    pcie: float


CARDS = (
    Card("A100 80GB SXM", 312e12, 0.0, 2039e9, 80e9, 32e9),
    Card("H100 SXM", 989e12, 1979e12, 3350e9, 80e9, 64e9),
    Card("H200 SXM", 989e12, 1979e12, 4800e9, 141e9, 64e9),
    Card("L4", 121e12, 242e12, 300e9, 24e9, 32e9),
    Card("L40S", 362e12, 733e12, 864e9, 48e9, 32e9),
)


@dataclass(frozen=True, slots=True)
class WindowLoad:
    """Means over a clip's full-length windows: rows ``computed``, ``attended`` slots over all rows, of both what the
    last layer ``omitted``, ``slots`` held; per stride: ``patches``, ``patch_bytes``,
    ``tower_flops``."""

    clip: str
    computed: float
    attended: float
    omitted: tuple[float, float]
    slots: float
    patches: float
    patch_bytes: float
    tower_flops: float


def predicted_streams(rows: Sequence[dict[str, Any]], card: str, precision: str) -> float:
    """Predicted streams for the worst clip."""
    return min(float(row["streams"]) for row in rows if (row["card"], row["precision"]) == (card, precision))


def predict(shape: str, clips: Sequence[Path]) -> list[dict[str, Any]]:
    """One row per card, precision and clip; without ``clips``, two generated ones. Raises ``ModelError`` for an unknown
    shape, ``SourceError`` for an unreadable clip."""
    model = load_shape(shape)
    with tempfile.TemporaryDirectory() as folder:
        loads = [_load(shape, model, clip) for clip in clips or made_clips(Path(folder))]
    return [
        _row(model, card, load, precision)
        for card in CARDS
        for precision in (("bf16", "fp8") if card.fp8 else ("bf16",))
        for load in loads
    ]


def _load(shape: str, model: VisionLanguageModel, clip: Path) -> WindowLoad:
    seconds = WINDOW_S + WINDOWS * STRIDE_S
    sampled = read_clip(clip, model.geometry, fps=2.0, at_least=seconds, at_most=seconds)
    samples = prune_clip(sampled, SPEC.stream, "replenish").samples
    strides = span_seconds(samples) / STRIDE_S
    patches = patch_batches([StreamFrame.of(sample) for sample in samples])
    counts = [
        (each.computed, each.attended, *each.omitted, each.tokens.kept + each.tokens.query)
        for each in _windows(shape, samples)
    ]
    computed, attended, omitted_rows, omitted_pairs, slots = map(statistics.fmean, zip(*counts, strict=True))
    return WindowLoad(
        clip=clip.stem,
        computed=computed,
        attended=attended,
        omitted=(omitted_rows, omitted_pairs),
        slots=slots,
        patches=sum(len(each.patches) for each in patches) / strides,
        patch_bytes=sum(each.patches.nbytes for each in patches) / strides,
        tower_flops=sum(model.tower_flops([each]) for each in patches if len(each.cells)) / strides,
    )


def _windows(shape: str, samples: Sequence[FrameSample]) -> list[WindowStats]:
    """The engine's counts of full-length windows; rows and slots do not depend on the depth."""
    windows: list[WindowStats] = []
    with FakeCuda():
        engine = NativeEngine(load_truncated(shape, 1, DEVICE))
        engine.admit(replace(SPEC, patient=True))
        for sample in samples:
            for request in engine.push(sample):
                engine.step([request])
                if request.end - samples[0].pts > WINDOW_S * MICROSECONDS:
                    windows += engine.stats.windows
    return windows


def _row(model: VisionLanguageModel, card: Card, load: WindowLoad, precision: str) -> dict[str, Any]:
    fp8 = precision == "fp8"
    width, dense = (1, card.fp8) if fp8 else (2, card.bf16)
    config, weights = model.text_config, list(model.model.parameters())
    omitted, pairs = load.omitted
    linear, attention = model.llm_flops(load.computed, 0, (omitted, 0)), model.llm_flops(0, load.attended, (0, pairs))
    layers = sum(weight.numel() for layer in model.layers for weight in layer.parameters())
    tower = sum(weight.numel() for weight in weights if weight.shape[0] != config.vocab_size) - layers
    # Embeddings and output head stay bf16 and are separate, as published, though a shape ties them.
    table_bytes = 2 * config.vocab_size * config.hidden_size
    slot_bytes = kv_token_bytes(model)
    key_heads = len(model.layers) * config.num_key_value_heads
    # A pass reads every weight once for the rows of many cameras.
    rows = ahead_rows(torch.device("cuda"))[1]
    prefill_bytes = (layers * width + table_bytes) * load.computed / rows
    prefill_bytes += slot_bytes * (load.computed + load.attended / TILES[-1])
    tower_bytes = tower * width * load.patches / (rows * model.geometry.merge**2) + load.patch_bytes
    prefill_s = max((linear / dense + attention / card.bf16) / PREFILL_MFU, prefill_bytes / card.bandwidth)
    # The tower's attention, at most a fortieth of its operations, is counted with the linear layers.
    tower_s = max(load.tower_flops / dense / TOWER_MFU, tower_bytes / card.bandwidth)
    # Default pool size.
    free = max(0, int(card.memory - (layers + tower) * width - 2 * table_bytes))
    memories = int(MEMORY_SHARE * free)
    pool = gpu_pool_bytes(model, free - memories, slot_bytes, pass_rows(torch.device("cuda")))
    by_time = STRIDE_S / (prefill_s + tower_s)
    by_windows = min(MOST_SLOTS, pool // slot_bytes) / load.slots
    by_memories = memories * WAITING / (DEFAULT_TOKENS * key_heads * MemorySpec().token_bytes(head_size(config), 2))
    by_pcie = STRIDE_S * card.pcie / load.patch_bytes
    return {
        "card": card.name,
        "precision": precision,
        "clip": load.clip,
        "streams": min(by_time, by_windows, by_memories, by_pcie),
        "by_time": by_time,
        "by_windows": by_windows,
        "by_memories": by_memories,
        "by_pcie": by_pcie,
        "tower_ms": 1e3 * tower_s,
        "prefill_ms": 1e3 * prefill_s,
        "gflop": (linear + attention + load.tower_flops) / 1e9,
        "gbytes": (prefill_bytes + tower_bytes) / 1e9,
        "computed": load.computed,
        "slots": load.slots,
    }
