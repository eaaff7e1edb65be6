"""Memory compressors on the KV of frames that leave the windows of clips: cap and coverage.

One engine answers a clip's windows. A memory of each compressor is handed what leaves them, frame by frame, under the
same cap. Coverage is the area under the distribution of distances from every token there ever was to the nearest that
is held; beside it the same of cosine distances, as published (CoRDS, figure 4), with the largest lead of each
compressor's distribution over that of ``infinipot_v``.
"""

import sys
from collections.abc import Sequence
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import Footage, Watched
from cluster.lab.evaluation.memory.answer import load_head_tokens, open_memory
from cluster.lab.evaluation.memory.recording import STREAM
from cluster.lab.evaluation.memory.score import (
    Space,
    coverage_area,
    largest_gap,
    nearest_cosine_distances,
    nearest_distances,
)
from cluster.lab.evaluation.memory.settings import ShareSetting
from cluster.memory.head_memory import KVChunk, LayerKV
from cluster.memory.stream import StreamMemory, join_frames
from cluster.registry import compressors

SHARES = (8, 16)
SPACES: tuple[Space, ...] = get_args(Space)
_METRICS = {"coverage": nearest_distances, "cosine": nearest_cosine_distances}
_BASELINE = "infinipot_v"
_COMPARED = (("cords", "infinipot_v"), ("infinipot_v", "uniform"))


def measure(footage: Footage) -> Part:
    """Figures: ``cap_violations``, ``coverage_<a>_over_<b>`` and ``cosine_...`` (the worst of all clips, caps and
    spaces)."""
    args = footage.args
    rows = [row for watched in footage.watched(args.model) for share in SHARES for row in _compare(watched, share)]
    note = (
        f"model {args.model}, random weights: {footage.model(args.model).random_weights}; caps are shares of all "
        "tokens that left the windows"
    )
    return Part(_figures(rows), rows, [note])


def _compare(left: Watched, share: int) -> list[dict[str, Any]]:
    """One row per compressor at a cap of one ``share``-th of what left."""
    full = join_frames(left.chunks)
    count = sum(layer.heads for layer in full)
    rows: list[dict[str, Any]] = []
    distances: dict[tuple[str, str, Space], list[Tensor]] = {}
    for name in compressors.names():
        if name == "none":
            continue
        memory, violations = _remember(left.chunks, ShareSetting(name, "frames", "top_k", share=1 / share))
        for metric, space in product(_METRICS, SPACES):
            distances[name, metric, space] = [
                _METRICS[metric](LayerKV(*(part[h : h + 1] for part in parts)), held, space)
                for number, layer in enumerate(full)
                for parts in [(layer.key, layer.value, layer.frame, layer.cell)]
                for h in range(layer.heads)
                if (held := load_head_tokens(memory, number, h)) is not None
            ]
        row = {
            "clip": left.clip,
            "cap": f"1/{share}",
            "compressor": name,
            "tokens": left.tokens,
            "held": memory.tokens / sum(map(len, memory.heads)),
            "compressions": memory.counts.compressions,
            "over_cap": violations,
        }
        rows.append(row)
        memory.tiers.close()
    for metric, space in product(_METRICS, SPACES):
        # The same scale for all of them: what a random point of the cache is away from the farthest holder.
        found = {str(row["compressor"]): distances[str(row["compressor"]), metric, space] for row in rows}
        furthest = max(float(head.max()) for heads in found.values() for head in heads)
        for row in rows:
            heads = found[str(row["compressor"])]
            # A head that holds nothing covers nothing.
            row[f"{metric}_{space}"] = sum(coverage_area(head, furthest) for head in heads) / count
            if metric == "cosine":
                ours, theirs = (torch.cat([d.flatten() for d in each]) for each in (heads, found[_BASELINE]))
                row[f"cosine_lead_{space}"] = largest_gap(ours, theirs, furthest)
    print(f"coverage: {left.clip}, 1/{share}", file=sys.stderr)
    return rows


def _remember(chunks: Sequence[KVChunk], setting: ShareSetting) -> tuple[StreamMemory, int]:
    """(the memory in the end, frames after which it, or its tier, held more than the cap)."""
    _, memory = open_memory(chunks, setting)
    violations = 0
    for chunk in chunks:
        memory.add_chunk(chunk)
        violations += max(memory.held_bytes, memory.tiers.lowest.nbytes(STREAM)) > memory.spec.cap_bytes
    memory.settle()
    return memory, violations


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    figures = {"cap_violations": float(sum(row["over_cap"] for row in rows))}
    by_name = {(row["clip"], row["cap"], row["compressor"]): row for row in rows}
    places = sorted({(row["clip"], row["cap"]) for row in rows})
    for metric, (ours, theirs) in product(_METRICS, _COMPARED):
        figures[f"{metric}_{ours}_over_{theirs}"] = min(
            by_name[(*place, ours)][f"{metric}_{space}"] / by_name[(*place, theirs)][f"{metric}_{space}"]
            for place in places
            for space in SPACES
        )
    return figures
