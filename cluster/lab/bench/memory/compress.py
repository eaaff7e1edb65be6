"""What compressing costs beside computing: the time of every compressor as a share of what made the KV.

What leaves a clip's windows is handed to a memory of each compressor frame by frame, again and again until it was
compressed often enough for one that comes late not to count. The model is large enough that arithmetic and not Python
decides what a window costs; the demo's model, at the same caps, is in the rows beside it.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import Footage, Watched
from cluster.memory.compress import Compressor
from cluster.memory.head_memory import KVChunk, LayerKV
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.registry import compressors
from cluster.types import MICROSECONDS, MemorySpec

CAPS = (1024, 4096)
"""Tokens of a layer and head; the larger is about what 64 MiB hold of the bench's model."""
PRODUCTION = "production"
"""The defaults, with a tier above the lowest."""
FIGURES = (PRODUCTION, "novelty", "infinipot_v", "cords")

_COMPRESSIONS = 4
_ROUNDS = 64


class Timed(Compressor):
    """Counts the seconds of another compressor."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__(compressor.columns)
        self._compressor = compressor
        self.seconds = 0.0

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        began = time.perf_counter()
        chosen = self._compressor.select(layers, budget)
        self.seconds += time.perf_counter() - began
        return chosen

    def weigh(self, layers: Sequence[LayerKV], chosen: Sequence[Tensor]) -> list[Tensor | None]:
        began = time.perf_counter()
        weights = self._compressor.weigh(layers, chosen)
        self.seconds += time.perf_counter() - began
        return weights

    def observe(self, queries: Sequence[Tensor]) -> None:
        self._compressor.observe(queries)


def measure(footage: Footage) -> Part:
    """Figures ``compress_share_<name>``: the worst clip and cap, of the bench's model."""
    args = footage.args
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys((args.bench_model, args.model)):
        for watched in footage.watched(model):
            for cap in args.caps:
                specs = {
                    name: MemorySpec(compressor=name, organiser="frames", retriever="top_k")
                    for name in compressors.names()
                    if name != "none"
                }
                for name, spec in {PRODUCTION: MemorySpec(), **specs}.items():
                    rows.append(_row(model, watched, name, spec, cap))
            print(f"compress: {model} on {watched.clip}", file=sys.stderr)
    figures = {
        f"compress_share_{name}": max(
            row["share_of_encode"] for row in rows if row["compressor"] == name and row["model"] == args.bench_model
        )
        for name in FIGURES
    }
    note = (
        "share_of_encode: compressing; remember_share: all that a memory does (clusters, blocks, tier); both over "
        "tower and language model for the same frames"
    )
    return Part(figures, rows, [note])


def _row(model: str, watched: Watched, name: str, spec: MemorySpec, cap: int) -> dict[str, Any]:
    """Frames through one compressor, after a round of them that is not timed."""
    chunks = watched.chunks
    key = chunks[0].key
    cap_bytes = cap * key.shape[0] * key.shape[1] * (2 * key.shape[3] * key.element_size() + 8)
    tiers = [Arena(4 * cap_bytes + 2**28, name="node", evicts=False)]
    if name == PRODUCTION:
        tiers.insert(0, Arena(2**28))
    memory = StreamMemory("camera", replace(spec, cap_bytes=cap_bytes), TierStack(tiers))
    span = chunks[-1].pts - chunks[0].pts + MICROSECONDS
    rounds = 1 + cap // max(1, watched.tokens)
    for number in range(rounds):
        _add(memory, chunks, number * span)
    timed = Timed(memory.compressor)
    memory.compressor = timed
    before, began, done = memory.counts.compressions, time.perf_counter(), 0
    while done < _ROUNDS and memory.counts.compressions < before + _COMPRESSIONS:
        _add(memory, chunks, (rounds + done) * span)
        done += 1
    seconds = time.perf_counter() - began
    compressions = memory.counts.compressions - before
    memory.tiers.close()
    return {
        "model": model,
        "clip": watched.clip,
        "cap": cap,
        "compressor": name,
        "tokens": watched.tokens * done,
        "compressions": compressions,
        "ms_per_compression": timed.seconds / max(1, compressions) * 1000,
        "encode_s": watched.encode_s * done,
        "share_of_encode": timed.seconds / (watched.encode_s * done),
        "remember_share": seconds / (watched.encode_s * done),
    }


def _add(memory: StreamMemory, chunks: Sequence[KVChunk], later: int) -> None:
    """All frames, ``later`` by so many microseconds."""
    for chunk in chunks:
        memory.add_chunk(replace(chunk, pts=chunk.pts + later))
