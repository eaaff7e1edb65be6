"""What compressing costs beside computing: the time of every compressor as a share of what made the KV.

What leaves a clip's windows is handed to each compressor frame by frame, again and again until it was compressed often
enough for one that comes late not to count. The model is large enough that arithmetic and not Python decides what a
window costs; the demo's model, at the same caps, is in the rows beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import Footage, Watched
from cluster.lab.bench.memory.held import HeldKV
from cluster.memory.head_memory import KVChunk, LayerKV
from cluster.registry import compressors

CAPS = (1024, 4096)
"""Tokens of a layer and head; the larger is about what 64 MiB hold of the bench's model."""
FIGURES = ("infinipot_v", "cords")

_COMPRESSIONS = 4
_ROUNDS = 64


def measure(footage: Footage) -> Part:
    """Figures ``compress_share_<name>``: the worst clip and cap, of the bench's model."""
    args = footage.args
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys((args.bench_model, args.model)):
        for watched in footage.watched(model):
            for cap in args.caps:
                for name in compressors.names():
                    if name != "none":
                        rows.append(_row(model, watched, name, cap))
            print(f"compress: {model} on {watched.clip}", file=sys.stderr)
    figures = {
        f"compress_share_{name}": max(
            row["share_of_encode"] for row in rows if row["compressor"] == name and row["model"] == args.bench_model
        )
        for name in FIGURES
    }
    note = "share_of_encode: taking in, joining and compressing, over tower and language model for the same frames"
    return Part(figures, rows, [note])


def _row(model: str, watched: Watched, name: str, cap: int) -> dict[str, Any]:
    """Frames through one compressor, after a round of them that is not timed."""
    _through(watched.chunks, name, cap, rounds=1 + cap // max(1, watched.tokens))
    held, seconds, rounds = _through(watched.chunks, name, cap, rounds=_ROUNDS)
    return {
        "model": model,
        "clip": watched.clip,
        "cap": cap,
        "compressor": name,
        "tokens": watched.tokens * rounds,
        "compressions": held.compressions,
        "ms_per_compression": seconds / max(1, held.compressions) * 1000,
        "encode_s": watched.encode_s * rounds,
        "share_of_encode": seconds / (watched.encode_s * rounds),
    }


def _through(chunks: Sequence[KVChunk], name: str, cap: int, *, rounds: int) -> tuple[HeldKV, float, int]:
    """The frames round after round, until there were some compressions; (held, seconds in ``add``, rounds)."""
    held = HeldKV(compressors.get(name)(chunks[0].columns), cap=cap)
    seconds = 0.0
    done = 0
    while done < rounds and held.compressions < _COMPRESSIONS:
        for frame in frames(chunks, first=done * (chunks[-1].index + 1)):
            began = time.perf_counter()
            held.add(frame)
            seconds += time.perf_counter() - began
        done += 1
    return held, seconds, done


def frames(chunks: Sequence[KVChunk], *, first: int = 0) -> list[list[LayerKV]]:
    """Each frame's KV layer by layer, numbered from ``first`` on."""
    return [replace(chunk, index=first + chunk.index).layers() for chunk in chunks]
