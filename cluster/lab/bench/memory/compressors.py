"""Memory compressors on KV that leaves the windows of clips: cost, coverage, and tokens kept of moving objects.

Part ``compress``: compression time as a share of the time to compute the KV. KV leaving a clip's windows is added frame
by frame to a memory with each compressor, and repeated until the number of compressions is large enough to average. The
model is large enough for arithmetic to dominate over Python; rows of the demo model at the same caps are included.

Part ``coverage``: area under the distribution of cosine distances from every token ever stored to the nearest held one,
for a memory with each compressor, given the same frames under the same cap.

Part ``objects``: for a static camera, KV of whole frames of generated clips goes into a memory that is compressed like
eviction does, whenever it holds more than a quarter of all tokens to come. The clip's ground truth says which cells its
moving objects cover.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.errors import SightlineError
from cluster.lab.bench.frames import prune_clip, read_clip
from cluster.lab.bench.harness import BenchResult, print_progress, timed_calls
from cluster.lab.bench.memory.footage import CAMERA, Footage, Watched, covered_cells
from cluster.lab.evaluation.memory.answer import load_head_tokens, open_memory
from cluster.lab.evaluation.memory.recording import STREAM
from cluster.lab.evaluation.memory.settings import ShareSetting, thinning_compressors
from cluster.lab.scenes.street_clips import make_clip
from cluster.lab.scenes.truth import SceneTruth
from cluster.memory.eviction import compress, join_frames
from cluster.memory.head_memory import KVChunk, LayerKV
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.types import MICROSECONDS, MemorySpec

CAPS = (1024, 4096)
"""Tokens per layer and head; the larger is about what 64 MiB hold for the bench model."""
PRODUCTION = "production"
"""Default settings, with a tier above the lowest."""
FIGURES = (PRODUCTION, "novelty", "infinipot_v", "cords")

_COMPRESSIONS = 4
_ROUNDS = 64
SHARES = (8, 16)
_COMPARED = (("cords", "infinipot_v"), ("infinipot_v", "uniform"))


def measure_cost(footage: Footage) -> BenchResult:
    """Figures ``compress_share_<name>``: the worst clip and cap for the bench model."""
    args = footage.args
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys((args.bench_model, args.model)):
        for watched in footage.watched(model):
            for cap in args.caps:
                specs = {
                    name: MemorySpec(compressor=name, organiser="frames", retriever="top_k")
                    for name in thinning_compressors()
                }
                for name, spec in {PRODUCTION: MemorySpec(), **specs}.items():
                    rows.append(_cost_row(model, watched, name, spec, cap))
            print_progress(f"compress: {model} on {watched.clip}")
    figures = {
        f"compress_share_{name}": max(
            row["share_of_encode"] for row in rows if row["compressor"] == name and row["model"] == args.bench_model
        )
        for name in FIGURES
    }
    note = (
        "share_of_encode: compression time; remember_share: all memory work (clusters, blocks, tier); both relative to "
        "tower and language model time for the same frames"
    )
    return BenchResult(figures, rows, [note])


def _cost_row(model: str, watched: Watched, name: str, spec: MemorySpec, cap: int) -> dict[str, Any]:
    """Time one compressor over the frames, after untimed rounds that fill the cap. Raises ``SightlineError``: it had
    nothing to compress."""
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
    before, began, done = memory.counts.compressions, time.perf_counter(), 0
    methods = [("compress", type(memory.compressor), method) for method in ("select", "weigh")]
    with timed_calls(methods, time.perf_counter) as spent:
        while done < _ROUNDS and memory.counts.compressions < before + _COMPRESSIONS:
            _add(memory, chunks, (rounds + done) * span)
            done += 1
    seconds = time.perf_counter() - began
    compressions = memory.counts.compressions - before
    memory.tiers.close()
    if not compressions:
        raise SightlineError(f"{name} compressed nothing of {watched.clip} at {cap} tokens, so its cost is unknown")
    return {
        "model": model,
        "clip": watched.clip,
        "cap": cap,
        "compressor": name,
        "tokens": watched.tokens * done,
        "compressions": compressions,
        "ms_per_compression": spent["compress"] / compressions * 1000,
        "encode_s": watched.encode_s * done,
        "share_of_encode": spent["compress"] / (watched.encode_s * done),
        "remember_share": seconds / (watched.encode_s * done),
    }


def _add(memory: StreamMemory, chunks: Sequence[KVChunk], later: int) -> None:
    """Add all frames, shifted by ``later`` microseconds."""
    for chunk in chunks:
        memory.add_chunk(replace(chunk, pts=chunk.pts + later))


# -- coverage --------------------------------------------------------------------------------------
Space = Literal["key", "value", "joint"]
SPACES: tuple[Space, ...] = get_args(Space)
_PARTS: dict[Space, tuple[str, ...]] = {"key": ("key",), "value": ("value",), "joint": ("key", "value")}


def nearest_distances(full: LayerKV, kept: LayerKV, space: Space) -> Tensor:
    """Cosine distance ``[H, n]`` of every token of ``full`` to the nearest ``kept`` one of its head, CoRDS's coverage
    measure (section 4.6); ``joint``: of concatenated key and value, each normalised."""
    wide, there = (
        torch.cat([F.normalize(getattr(of, part).float(), dim=-1) for part in _PARTS[space]], dim=-1)
        for of in (full, kept)
    )
    return (1 - (wide @ there.mT).amax(-1) / len(_PARTS[space])).clamp(min=0)


def coverage_area(distances: Tensor, furthest: float) -> float:
    """Area under the cumulative distribution of ``distances`` over ``[0, furthest]``, normalised: 1 if all are 0."""
    if furthest <= 0:
        return 1.0
    return float((1 - distances.clamp(max=furthest) / furthest).mean())


def measure_coverage(footage: Footage) -> BenchResult:
    """Figures ``cap_violations`` and ``coverage_<a>_over_<b>`` (the worst over clips, caps and spaces)."""
    args = footage.args
    rows = [row for watched in footage.watched(args.model) for share in SHARES for row in _compare(watched, share)]
    note = (
        f"model {args.model}, random weights: {footage.model(args.model).random_weights}; caps are shares of all "
        "tokens that left the windows"
    )
    return BenchResult(_figures(rows), rows, [note])


def _compare(left: Watched, share: int) -> list[dict[str, Any]]:
    """One row per compressor at a cap of one ``share``-th of the tokens that left."""
    # bfloat16 as on a GPU: caps are shares of these bytes.
    chunks = [chunk.to(torch.bfloat16) for chunk in left.chunks]
    full = join_frames(left.chunks)
    count = sum(layer.heads for layer in full)
    rows: list[dict[str, Any]] = []
    # Per layer and head: all tokens, and those held.
    held: dict[str, list[tuple[LayerKV, LayerKV]]] = {}
    for name in thinning_compressors():
        memory, violations = _remember(chunks, ShareSetting(name, "frames", "top_k", share=1 / share))
        held[name] = [
            (LayerKV(*(part[h : h + 1] for part in (layer.key, layer.value, layer.frame, layer.cell))), kept)
            for number, layer in enumerate(full)
            for h in range(layer.heads)
            if (kept := load_head_tokens(memory, number, h)) is not None
        ]
        rows.append(
            {
                "clip": left.clip,
                "cap": f"1/{share}",
                "compressor": name,
                "tokens": left.tokens,
                "held": memory.tokens / sum(map(len, memory.heads)),
                "compressions": memory.counts.compressions,
                "over_cap": violations,
            }
        )
        memory.tiers.close()
    for space in SPACES:
        # The same scale for all compressors: the largest distance found with any.
        found = {name: [nearest_distances(*head, space) for head in heads] for name, heads in held.items()}
        furthest = max(float(head.max()) for heads in found.values() for head in heads)
        for row in rows:
            # A head that holds nothing covers nothing.
            row[f"coverage_{space}"] = sum(coverage_area(d, furthest) for d in found[row["compressor"]]) / count
    print_progress(f"coverage: {left.clip}, 1/{share}")
    return rows


def _remember(chunks: Sequence[KVChunk], setting: ShareSetting) -> tuple[StreamMemory, int]:
    """Fill a memory; returns it and the number of frames after which it or its tier exceeded the cap."""
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
    for ours, theirs in _COMPARED:
        figures[f"coverage_{ours}_over_{theirs}"] = min(
            by_name[(*place, ours)][f"coverage_{space}"] / by_name[(*place, theirs)][f"coverage_{space}"]
            for place in places
            for space in SPACES
        )
    return figures


# -- moving objects --------------------------------------------------------------------------------
TUNED = (("street", 0), ("street", 1), ("street", 2))
HELD_OUT = (("street", 3), ("street", 4), ("street", 5), ("noisy", 11), ("hevc", 12))
"""Kind and seed of the clips on which the settings of ``cords`` were tuned, and of held-out clips."""
COMPARED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "cords": ("cords", {}),
    "cords_paper": ("cords", {"objective": "paper"}),
    "infinipot_v": ("infinipot_v", {}),
    "uniform": ("uniform", {}),
}

_QUARTER, _TARGET = 0.25, 0.75
_BLOCK = 4
_FPS, _SAMPLED_FPS = 6.0, 2.0
_CAP = 2**29


def measure_objects(footage: Footage) -> BenchResult:
    """Figures ``object_kept_<name>_quarter``: the worst of the held-out clips."""
    args = footage.args
    rows: list[dict[str, Any]] = []
    for kind, seed in TUNED + HELD_OUT:
        chunks, cells = _watch_objects(footage, kind, seed)
        clip = {"clip": f"{kind} {seed}", "held_out": (kind, seed) in HELD_OUT}
        rows += [
            {**clip, "compressor": name, **_object_row(chunks, cells, *compared)} for name, compared in COMPARED.items()
        ]
        print_progress(f"objects: {kind} {seed}")
    figures = {
        f"object_kept_{name}_quarter": min(
            row["object_kept"] for row in rows if row["held_out"] and row["compressor"] == name
        )
        for name in COMPARED
    }
    return BenchResult(figures, rows, [f"model {args.model}; whole frames; held, object: shares of all tokens stored"])


def _watch_objects(footage: Footage, kind: str, seed: int) -> tuple[list[KVChunk], list[set[int]]]:
    """KV that leaves the windows of a generated clip, and the cells of moving objects per frame."""
    seconds = footage.args.object_seconds
    with TemporaryDirectory() as directory:
        path = Path(directory) / "clip.mp4"
        truth = make_clip(kind, path, seconds=seconds, fps=_FPS, seed=seed)
        geometry = footage.model(footage.args.model).geometry
        frames = read_clip(path, geometry, fps=_SAMPLED_FPS, at_least=seconds, at_most=seconds)
    samples = prune_clip(frames, CAMERA, "none").samples
    chunks = footage.watch(footage.args.model, f"{kind} {seed}", samples).chunks
    begins = samples[0].pts
    # A frame may merge several pictures.
    shown = [number / _SAMPLED_FPS for number in range(geometry.temporal)]
    return chunks, [
        set().union(*(object_cells(truth, (c.pts - begins) / MICROSECONDS + at, c.rows, c.columns) for at in shown))
        for c in chunks
    ]


def object_cells(truth: SceneTruth, second: float, rows: int, columns: int) -> set[int]:
    """Cells of a grid covered at least half by the box of an object that moves at ``second``."""
    in_cells = np.array([columns, rows, columns, rows])
    size = np.array([truth.width, truth.height, truth.width, truth.height])
    boxes = [np.array(each.box) * in_cells / size for each in truth.at(second) if each.moving]
    return {int(cell) for box in boxes for cell in covered_cells(box, (rows, columns))}


def _object_row(
    chunks: Sequence[KVChunk], cells: Sequence[set[int]], compressor: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Fill a memory with frames, whose ``cells`` show moving objects; returns the shares kept."""
    spec = MemorySpec(compressor=compressor, compressor_options=options, cap_bytes=_CAP, block_frames=_BLOCK)
    memory = StreamMemory(CAMERA, spec, TierStack([Arena(_CAP, evicts=False)]))
    tokens = sum(chunk.tokens for chunk in chunks)
    quarter = _QUARTER * tokens
    for chunk in chunks:
        memory.accept_chunk(chunk)
        if memory.settle_due or chunk is chunks[-1]:
            memory.settle()
            held = memory.heads[0][0].tokens
            if held > quarter:
                compress(memory, _TARGET * quarter / held)
    # A fresh memory numbers its frames from 0.
    wanted = {
        (number, cell)
        for number, (chunk, shown) in enumerate(zip(chunks, cells, strict=True))
        for cell in shown.intersection(chunk.cell.tolist())
    }
    heads = [head for _, _, head in memory.iter_heads()]
    kept = [len(wanted.intersection(zip(head.frame.tolist(), head.cell.tolist(), strict=True))) for head in heads]
    memory.tiers.close()
    return {
        "tokens": tokens,
        "held": sum(head.tokens for head in heads) / len(heads) / tokens,
        "object": len(wanted) / tokens,
        "compressions": memory.counts.compressions,
        "object_kept": sum(kept) / len(heads) / max(1, len(wanted)),
    }
