"""Memory compressors on the KV of frames that leave the windows of real clips: cost, cap and coverage.

One engine answers a clip's windows. Every compressor is handed what leaves them, frame by frame, and holds it under the
same cap. Time is a share of what the engine took to encode the same frames; coverage is the area under the
distribution of distances from every token there ever was to the nearest that is held (CoRDS, figure 4).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from cluster.bench.frames import add_clip_arguments, clip_names, made_clips, prune_clip, read_clip
from cluster.bench.harness import BenchResult
from cluster.bench.window import QUESTION
from cluster.engine.native.engine import NativeEngine
from cluster.memory.chunk import KVChunk
from cluster.memory.compress import compressors
from cluster.memory.coverage import Space, coverage_area, nearest_distances
from cluster.memory.held import HeldKV
from cluster.memory.layer import LayerKV
from cluster.models import load_model
from cluster.types import StreamSpec

SHARES = (8, 16)
SPACES: tuple[Space, ...] = get_args(Space)
_COMPARED = (("cords", "infinipot_v"), ("infinipot_v", "uniform"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the harness."""
    add_clip_arguments(parser, model="demo", window=20.0, stride=4.0)
    parser.add_argument("--seconds", type=float, default=180.0, metavar="S", help="of each clip (default: 180)")


@dataclass(slots=True)
class _Run:
    """What left one clip's windows, and how long its windows took to encode."""

    chunks: list[KVChunk] = field(default_factory=list)
    encode_s: float = 0.0


def run(args: argparse.Namespace) -> BenchResult:
    """Figures: ``cap_violations``, ``compress_share_<name>`` (the worst clip and cap), ``coverage_<a>_over_<b>`` (the
    worst of all clips, caps and spaces)."""
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for name, path in clip_names(args.clips or made_clips(Path(directory))):
            clip = read_clip(path, model.geometry, fps=args.fps, at_least=args.seconds, at_most=args.seconds)
            samples = prune_clip(clip, "camera", args.pruner).samples
            left = _Run()
            engine = NativeEngine(model, leave=left.chunks.append)
            spec = StreamSpec("camera", (QUESTION,), args.window, args.stride, static_gate=False)
            engine.admit(spec)
            for sample in samples:
                for request in engine.push(sample):
                    (answer,) = engine.step([request])
                    left.encode_s += answer.timing.vision_s + answer.timing.llm_s
            rows += [row for share in SHARES for row in _compare(name, left, share)]
    notes = [
        f"model {args.model}, random weights: {model.random_weights}; window {args.window:g} s every "
        f"{args.stride:g} s, {args.fps:g} FPS, pruner {args.pruner}; "
        "caps are shares of all tokens that left the windows",
    ]
    return BenchResult("memory", _figures(rows), rows, notes)


def _compare(clip: str, left: _Run, share: int) -> list[dict[str, Any]]:
    """One row per compressor at a cap of one ``share``-th of what left."""
    total = sum(chunk.tokens for chunk in left.chunks)
    cap = max(1, total // share)
    full = _joined(left.chunks)
    held = {name: _hold(name, left.chunks, cap) for name in compressors.names() if name != "none"}
    # The same scale for all of them: what a random point of the cache is away from the farthest holder.
    distances = {
        (name, space): [nearest_distances(f, k, space) for f, k in zip(full, memory.layers, strict=True)]
        for name, (memory, _, _) in held.items()
        for space in SPACES
    }
    rows = []
    for name, (memory, seconds, violations) in held.items():
        areas = {}
        for space in SPACES:
            furthest = max(float(d.max()) for other in held for d in distances[other, space])
            layers = distances[name, space]
            areas[space] = sum(coverage_area(layer, furthest) for layer in layers) / len(layers)
        row = {
            "clip": clip,
            "cap": f"1/{share}",
            "compressor": name,
            "tokens": total,
            "held": memory.tokens,
            "compressions": memory.compressions,
            "over_cap": violations,
            "share_of_encode": seconds / left.encode_s,
            **{f"coverage_{space}": areas[space] for space in SPACES},
        }
        rows.append(row)
        print(f"{clip} 1/{share} {name}: {row['share_of_encode']:.3%} of encoding", file=sys.stderr)
    return rows


def _hold(name: str, chunks: Sequence[KVChunk], cap: int) -> tuple[HeldKV, float, int]:
    """(what is held in the end, seconds spent, frames after which more than the cap was held)."""
    memory = HeldKV(compressors.get(name)(chunks[0].columns), cap=cap)
    violations, seconds = 0, 0.0
    for chunk in chunks:
        layers = chunk.layers()
        began = time.perf_counter()
        memory.add(layers)
        seconds += time.perf_counter() - began
        violations += memory.tokens > cap
    return memory, seconds, violations


def _joined(chunks: Sequence[KVChunk]) -> list[LayerKV]:
    layers = chunks[0].layers()
    for chunk in chunks[1:]:
        layers = [before.then(after) for before, after in zip(layers, chunk.layers(), strict=True)]
    return layers


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    figures = {"cap_violations": float(sum(row["over_cap"] for row in rows))}
    for name in ("infinipot_v", "cords"):
        figures[f"compress_share_{name}"] = max(row["share_of_encode"] for row in rows if row["compressor"] == name)
    by_name = {(row["clip"], row["cap"], row["compressor"]): row for row in rows}
    places = sorted({(row["clip"], row["cap"]) for row in rows})
    for ours, theirs in _COMPARED:
        figures[f"coverage_{ours}_over_{theirs}"] = min(
            by_name[(*place, ours)][f"coverage_{space}"] / by_name[(*place, theirs)][f"coverage_{space}"]
            for place in places
            for space in SPACES
        )
    return figures
