"""Splits a step's work into passes of bounded size: small windows are batched, large ones split."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from cluster.engine.native.forward import PassResult, PassStats, StreamPass, ragged_forward
from cluster.engine.native.kernels import Kernel
from cluster.models.base import VisionLanguageModel

# Minimum rows of a pass before a window ends: every pass reads all weights, so fewer rows would take as long, and cost
# almost nothing in the pass at the window's end.
AHEAD_ROWS = 256
CPU_AHEAD_ROWS = 64
# Maximum rows per pass: bounds activations when many cameras start at once.
ROWS = 16384
# On a CPU, a layer's activations should stay in cache: a window of 5,800 tokens took 4 to 8 % less time.
CPU_ROWS = 2048


def pass_rows(device: torch.device) -> int:
    """The fastest row limit per pass for a device."""
    return CPU_ROWS if device.type == "cpu" else ROWS


def ahead_rows(device: torch.device) -> tuple[int, int]:
    """Minimum and maximum rows of a pass before windows end; windows that end meanwhile wait for it."""
    return (CPU_AHEAD_ROWS if device.type == "cpu" else AHEAD_ROWS), pass_rows(device) // 4


def run_passes(
    model: VisionLanguageModel, works: Sequence[StreamPass], kernel: Kernel[Any], rows: int
) -> list[PassResult]:
    """Run :func:`~cluster.engine.native.forward.ragged_forward` in passes of about ``rows`` rows, with the results of a
    single pass.

    A window's rows may run in successive passes: by causality, earlier rows do not see later ones, and later passes
    find their KV in the pool. A window with narrowing is not split, because it selects among all its rows.
    """
    results: list[list[PassResult]] = [[] for _ in works]
    for number, work in enumerate(works):
        if not len(work.embeds):
            nothing = work.embeds[:, : model.text_config.hidden_size]
            results[number].append(PassResult(nothing, work.slots, PassStats(len(model.layers)), []))
    pieces = [_pieces(work, rows) if len(work.embeds) else [] for work in works]
    for group in _groups(pieces, rows):
        given = ragged_forward(model, [piece for _, piece in group], kernel)
        for (stream, _), result in zip(group, given, strict=True):
            results[stream].append(result)
    return [_joined(parts) for parts in results]


def _pieces(work: StreamPass, rows: int) -> list[StreamPass]:
    """Equal pieces of at most ``rows`` rows; the last piece also has the tail, and may exceed the limit."""
    count = -(-len(work.slots) // rows)
    if work.narrowing is not None or count < 2:
        return [work]
    cuts = [len(work.slots) * i // count for i in range(count + 1)]
    if work.past is not None:
        # A frame's rows stay together: it retrieves once.
        borders = np.flatnonzero(np.diff(work.past.frame_of(work.slots))) + 1
        borders = np.concatenate(([0], borders, [len(work.slots)]))
        cuts = np.unique(borders[np.searchsorted(borders, cuts)]).tolist()
    nothing = np.zeros(0, np.int64)
    pieces = []
    for start, stop in pairwise(cuts):
        last = stop == len(work.slots)
        inside = (work.narrowable >= start) & (work.narrowable < stop)
        piece = replace(
            work,
            slots=work.slots[start:stop],
            embeds=work.embeds[start:] if last else work.embeds[start:stop],
            positions=work.positions[:, start:] if last else work.positions[:, start:stop],
            narrowable=work.narrowable[inside] - start,
        )
        if not last:
            piece = replace(piece, tail_slots=nothing, tail_runs=(), watched=nothing)
        pieces.append(piece)
    return pieces


def _groups(streams: Sequence[Sequence[StreamPass]], rows: int) -> list[list[tuple[int, StreamPass]]]:
    """Group pieces, each with its stream's index, up to ``rows`` rows; never two of one stream."""
    groups: list[list[tuple[int, StreamPass]]] = []
    filled = rows
    for stream, pieces in enumerate(streams):
        for piece in pieces:
            if filled + len(piece.embeds) > rows or groups[-1][-1][0] == stream:
                groups.append([])
                filled = 0
            groups[-1].append((stream, piece))
            filled += len(piece.embeds)
    return groups


def _joined(parts: Sequence[PassResult]) -> PassResult:
    """Combine the results of a stream's pieces; the tail is in the last one."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    stats = PassStats(
        layers=last.stats.layers,
        rows=sum(part.stats.rows for part in parts),
        attended=sum(part.stats.attended for part in parts),
        narrowable_rows=sum(part.stats.narrowable_rows for part in parts),
        omitted=(sum(part.stats.omitted[0] for part in parts), sum(part.stats.omitted[1] for part in parts)),
    )
    return PassResult(last.hidden, np.concatenate([part.slots for part in parts]), stats, last.queries)
