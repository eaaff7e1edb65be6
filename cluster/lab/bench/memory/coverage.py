"""Memory compressors on the KV of frames that leave the windows of clips: cap and coverage.

One engine answers a clip's windows. Every compressor is handed what leaves them, frame by frame, and holds it under the
same cap. Coverage is the area under the distribution of distances from every token there ever was to the nearest that
is held (CoRDS, figure 4).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, get_args

from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import Footage, Watched
from cluster.lab.bench.memory.held import HeldKV
from cluster.lab.evaluation.memory.score import Space, coverage_area, nearest_distances
from cluster.memory.head_memory import KVChunk, LayerKV
from cluster.registry import compressors

SHARES = (8, 16)
SPACES: tuple[Space, ...] = get_args(Space)
_COMPARED = (("cords", "infinipot_v"), ("infinipot_v", "uniform"))


def measure(footage: Footage) -> Part:
    """Figures: ``cap_violations``, ``coverage_<a>_over_<b>`` (the worst of all clips, caps and spaces)."""
    args = footage.args
    rows = [row for watched in footage.watched(args.model) for share in SHARES for row in _compare(watched, share)]
    note = (
        f"model {args.model}, random weights: {footage.model(args.model).random_weights}; caps are shares of all "
        "tokens that left the windows"
    )
    return Part(_figures(rows), rows, [note])


def _compare(left: Watched, share: int) -> list[dict[str, Any]]:
    """One row per compressor at a cap of one ``share``-th of what left."""
    total = left.tokens
    cap = max(1, total // share)
    full = _joined(left.chunks)
    held = {name: _hold(name, left.chunks, cap) for name in compressors.names() if name != "none"}
    # The same scale for all of them: what a random point of the cache is away from the farthest holder.
    distances = {
        (name, space): [nearest_distances(f, k, space) for f, k in zip(full, memory.layers, strict=True)]
        for name, (memory, _) in held.items()
        for space in SPACES
    }
    rows = []
    for name, (memory, violations) in held.items():
        areas = {}
        for space in SPACES:
            furthest = max(float(d.max()) for other in held for d in distances[other, space])
            layers = distances[name, space]
            areas[space] = sum(coverage_area(layer, furthest) for layer in layers) / len(layers)
        row = {
            "clip": left.clip,
            "cap": f"1/{share}",
            "compressor": name,
            "tokens": total,
            "held": memory.tokens,
            "compressions": memory.compressions,
            "over_cap": violations,
            **{f"coverage_{space}": areas[space] for space in SPACES},
        }
        rows.append(row)
    print(f"coverage: {left.clip}, 1/{share}", file=sys.stderr)
    return rows


def _hold(name: str, chunks: Sequence[KVChunk], cap: int) -> tuple[HeldKV, int]:
    """(what is held in the end, frames after which more than the cap was held)."""
    memory = HeldKV(compressors.get(name)(chunks[0].columns), cap=cap)
    violations = 0
    for chunk in chunks:
        memory.add(chunk.layers())
        violations += memory.tokens > cap
    return memory, violations


def _joined(chunks: Sequence[KVChunk]) -> list[LayerKV]:
    layers = chunks[0].layers()
    for chunk in chunks[1:]:
        layers = [before.append(after) for before, after in zip(layers, chunk.layers(), strict=True)]
    return layers


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    figures = {"cap_violations": float(sum(row["over_cap"] for row in rows))}
    by_name = {(row["clip"], row["cap"], row["compressor"]): row for row in rows}
    places = sorted({(row["clip"], row["cap"]) for row in rows})
    for ours, theirs in _COMPARED:
        figures[f"coverage_{ours}_over_{theirs}"] = min(
            by_name[(*place, ours)][f"coverage_{space}"] / by_name[(*place, theirs)][f"coverage_{space}"]
            for place in places
            for space in SPACES
        )
    return figures
