"""InfiniPot-V as published: its rule in numpy, and how much of what it keeps the production compressor keeps.

The rule is that of the paper's algorithm 2 as its published code reads it, for whole frames and one compression, with
the paper's settings and the pools of that code. It is stated apart from the compressor, cell by cell and in float64.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import CAMERA, made_chunks
from cluster.memory.stream import join_frames
from cluster.registry import compressors

Floats = npt.NDArray[np.float64]

POOLS = ((7, 3), (5, 2), (3, 1), (1, 0))
"""(width, dimensions) of the pools in each quarter of the layers."""
SHAPES = ((32, 8, 10), (24, 14, 7), (16, 4, 6), (12, 9, 3))
"""Frames, rows and columns. Twelve frames have one that is recent and a half that TaR adds at a quarter."""
LAYERS = 8
SHARES = (1 / 4, 3 / 4)


def published_selection(
    key: Floats,
    value: Floats,
    grid: tuple[int, int],
    budget: int,
    quarter: int,
    *,
    share: float = 0.5,
    recent: float = 0.125,
) -> npt.NDArray[np.int64]:
    """Tokens ``[H, budget]`` that one compression of whole frames keeps, ascending; the earliest of equals.

    Args:
        key, value: ``[H, n, D]``, frame by frame, cells row by row.
        grid: rows and columns of a frame.
        budget: tokens to keep.
        quarter: of the model that the layer is in, 0 to 3.
        share: of the budget for TaR, recent frames included.
        recent: share of the frames that are recent.

    Raises:
        ValueError: frames are not whole, none is recent, or the recent ones exceed the budget for TaR.
    """
    heads, tokens, _ = key.shape
    cells = grid[0] * grid[1]
    frames = tokens // cells
    newest = int(frames * recent)
    distinct = budget - round((1 - share) * budget) - newest * cells
    if tokens % cells or newest < 1 or distinct < 0:
        raise ValueError(f"{tokens} tokens of {cells} a frame and a budget of {budget} are not what the code can take")
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
    """Means of norms ``[H, frames, rows, columns]`` over ``width`` places along the last ``dimensions``, with zeros
    outside; along one dimension, over all tokens in a row."""
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


def measure() -> Part:
    """Figure ``infinipot_v_parity``: the share of the rule's tokens that the compressor keeps as well, in the layer
    and head with the smallest."""
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
    print("infinipot_v: as published", file=sys.stderr)
    note = "infinipot_v_paper against the published rule in numpy: whole made frames, one compression, with its pools"
    return Part({"infinipot_v_parity": min(row["overlap"] for row in rows)}, rows, [note])
