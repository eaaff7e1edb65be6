"""Parity with published policies: independent numpy implementations of their rules against production code.

* InfiniPot-V: algorithm 2 of the paper as implemented by its published code, for whole frames and one compression, with
  the paper's settings and the code's pools, cell by cell in float64
* ReKV: the frames that questions read from a memory of whole frames, with real frames and queries; the rule uses raw
  keys of all frames, with each key head repeated for its query heads
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult, print_progress
from cluster.lab.bench.memory.footage import CAMERA, Footage, Watched, made_chunks
from cluster.memory.eviction import join_frames
from cluster.memory.retrieval_session import RetrievalSession
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.registry import compressors, retrievers
from cluster.types import MemorySpec

Floats = npt.NDArray[np.float64]

FRAMES = 8
"""Frames that a question reads with ReKV; fewer than there are at any question."""

_CAP = 2**30

POOLS = ((7, 3), (5, 2), (3, 1), (1, 0))
"""(width, dimensions) of the pooling in each quarter of the layers."""
SHAPES = ((32, 8, 10), (24, 14, 7), (16, 4, 6), (12, 9, 3))
"""Frames, rows and columns. Twelve frames have one recent frame, and half a frame that TaR adds at a quarter."""
TAR, RECENT = 0.5, 0.125
"""TaR's share of the budget, including recent frames; share of the frames that are recent."""
LAYERS = 8
SHARES = (1 / 4, 3 / 4)


def published_selection(
    key: Floats, value: Floats, grid: tuple[int, int], budget: int, quarter: int
) -> npt.NDArray[np.int64]:
    """Tokens ``[H, budget]`` that one compression of whole frames keeps, ascending; ties go to the earliest.

    Args:
        key, value: ``[H, n, D]``, frame by frame, cells row by row.
        grid: rows and columns of a frame.
        budget: tokens to keep.
        quarter: the layer's quarter of the model, 0 to 3.

    Raises:
        ValueError: frames are not whole, none is recent, or the recent ones exceed TaR's budget.
    """
    heads, tokens, _ = key.shape
    cells = grid[0] * grid[1]
    frames = tokens // cells
    newest = int(frames * RECENT)
    distinct = budget - round((1 - TAR) * budget) - newest * cells
    if tokens % cells or newest < 1 or distinct < 0:
        raise ValueError(f"the published rule does not apply to {tokens} tokens of {cells} a frame, budget {budget}")
    unit = (key / np.linalg.norm(key, axis=-1, keepdims=True)).reshape(heads, frames, cells, -1)
    past, now = unit[:, :-newest], unit[:, -newest:]
    similar = np.einsum("hfcd,hrcd->hfc", past, now) / newest
    forced = np.zeros((heads, tokens), dtype=bool)
    forced[:, -newest * cells :] = True
    np.put_along_axis(forced, similar.reshape(heads, -1).argsort(axis=1, kind="stable")[:, :distinct], True, axis=1)
    pooled = _pool_norms(np.linalg.norm(value, axis=-1).reshape(heads, frames, *grid), *POOLS[quarter])
    pooled = np.where(forced, np.inf, pooled.reshape(heads, -1))
    return np.sort((-pooled).argsort(axis=1, kind="stable")[:, :budget], axis=1)


def _pool_norms(norms: Floats, width: int, dimensions: int) -> Floats:
    """Mean-pool norms ``[H, frames, rows, columns]`` with ``width`` over the last ``dimensions``, zero-padded; with
    one dimension, over the flattened tokens."""
    if dimensions == 1:
        norms = norms.reshape(len(norms), -1)
    elif dimensions:
        width = min(width, *norms.shape[1:])
        width -= width % 2 == 0
    if not dimensions:
        return norms
    axes = tuple(range(norms.ndim - dimensions, norms.ndim))
    padded = np.pad(norms, [(width // 2, width // 2) if axis in axes else (0, 0) for axis in range(norms.ndim)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (width,) * dimensions, axis=axes)
    means: Floats = windows.mean(axis=tuple(range(-dimensions, 0)))
    return means


def measure_infinipot_v() -> BenchResult:
    """Figure ``infinipot_v_parity``: share of the rule's tokens that the compressor keeps too, in the worst layer and
    head."""
    rows: list[dict[str, Any]] = []
    for seed, (frames, *grid) in enumerate(SHAPES):
        shape = {"layers": LAYERS, "heads": 2, "rows": grid[0], "columns": grid[1], "width": 32}
        layers = join_frames(list(made_chunks(CAMERA, frames, **shape, seed=seed)))
        for share in SHARES:
            budget = round(share * frames) * grid[0] * grid[1]
            chosen = compressors.get("infinipot_v_paper")(grid[1]).select(layers, budget)
            same = [
                np.intersect1d(ours, theirs).size / budget
                for number, (layer, kept) in enumerate(zip(layers, chosen, strict=True))
                for ours, theirs in zip(
                    kept.numpy(),
                    published_selection(
                        layer.key.double().numpy(),
                        layer.value.double().numpy(),
                        (grid[0], grid[1]),
                        budget,
                        number * len(POOLS) // LAYERS,
                    ),
                    strict=True,
                )
            ]
            rows.append(
                {
                    "frames": frames,
                    "rows": grid[0],
                    "columns": grid[1],
                    "budget": f"{share:g}",
                    "heads": len(same),
                    "overlap": min(same),
                    "overlap_mean": sum(same) / len(same),
                }
            )
    print_progress("infinipot_v: as published")
    note = "infinipot_v_paper against the published rule and pools in numpy: whole synthetic frames, one compression"
    return BenchResult({"infinipot_v_parity": min(row["overlap"] for row in rows)}, rows, [note])


def measure_rekv(footage: Footage) -> BenchResult:
    """Figure ``rekv_parity``: share of layers and questions in which every head read exactly the published frames."""
    query_heads = footage.model(footage.args.model).text_config.num_attention_heads
    rows: list[dict[str, Any]] = []
    for watched in footage.watched(footage.args.model):
        if not watched.asked:
            raise ConfigError(f"{watched.clip}: too few frames left a window for a question; increase --seconds")
        same = same_frames(watched, query_heads)
        layers, heads = watched.chunks[0].key.shape[:2]
        rows.append(
            {
                "clip": watched.clip,
                "questions": len(watched.asked),
                "layers": layers,
                "key_heads": heads,
                "query_heads": query_heads,
                "frames": watched.asked[-1].frames,
                "read": FRAMES,
                "parity": statistics.fmean(same),
            }
        )
    return BenchResult({"rekv_parity": min(row["parity"] for row in rows)}, rows)


def same_frames(watched: Watched, query_heads: int) -> list[bool]:
    """For each question and layer, whether all heads read exactly the published frames."""
    spec = MemorySpec(compressor="none", organiser="frames", cap_bytes=_CAP)
    memory = StreamMemory(CAMERA, spec, TierStack([Arena(_CAP)]))
    retriever = retrievers.get("rekv")(frames=FRAMES)
    keys = [chunk.key.float().cpu().numpy() for chunk in watched.chunks]
    found = []
    for asked in watched.asked:
        for chunk in watched.chunks[memory.frames : asked.frames]:
            memory.add_chunk(chunk)
        memory.settle()
        with RetrievalSession(memory, retriever) as retrieval:
            for layer, query in enumerate(asked.queries):
                by_head = query.cpu().numpy().reshape(query_heads, -1, query.shape[2])
                wanted = published_frames(by_head, [key[layer] for key in keys[: asked.frames]], FRAMES)
                read = retrieval.fetch(layer, query)
                frames = [set(of[there].tolist()) for of, there in zip(read.frame, read.valid, strict=True)]
                found.append(all(each == wanted for each in frames))
    return found


def published_frames(query: np.ndarray, keys: Sequence[np.ndarray], count: int) -> set[int]:
    """Numbers of the ``count`` frames whose mean key has the largest dot product with the mean query, heads
    concatenated.

    Args:
        query: all query heads, before rotary ``[H, r, D]``.
        keys: per frame, before rotary ``[Hkv, t, D]``.
    """
    group = len(query) // len(keys[0])
    question = query.astype(np.float64).mean(axis=1).ravel()
    frames = np.stack([key.astype(np.float64).mean(axis=1).repeat(group, axis=0).ravel() for key in keys])
    return set(np.argsort(-(frames @ question), kind="stable")[:count].tolist())
