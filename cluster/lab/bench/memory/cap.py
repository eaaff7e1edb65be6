"""Tier sizes and process growth over 100,000 frames of one camera under a small cap.

Synthetic small frames are stored at full speed in two tiers: host memory for half the cap, and a node tier that holds
everything. The tiers' own byte counts are checked after every frame; resident memory is read after a tenth of the
frames, when everything has been full once, and at the end.

Write amplification is compared between organisers: production's, which rewrites clusters when tokens join or leave
them, and ``kvmu``, which writes blocks once.

Leaks are searched for at the default cap, by peak resident memory while storing the second and the twelfth cap's worth
of frames.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult, print_progress
from cluster.lab.bench.memory.footage import CAMERA, made_chunks
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.types import MemorySpec

CAP_BYTES = 2 * 2**20
SHAPE = {"layers": 1, "heads": 1, "rows": 1, "columns": 2, "width": 128}
LEAK_SHAPE = {"layers": 2, "heads": 1, "rows": 8, "columns": 16, "width": 48}
WARM_UP = 0.1
ROWS = 10
_SLAB = 64 * 2**10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of part cap to the parser."""
    parser.add_argument("--frames", type=int, default=100_000, metavar="N", help="frames in part cap")
    parser.add_argument(
        "--leak-cap-mib",
        type=float,
        default=MemorySpec().cap_bytes / 2**20,
        metavar="MIB",
        help="cap of the memory in part cap's search for leaks",
    )


def measure(args: argparse.Namespace) -> BenchResult:
    """Figures ``cap_violations`` (frames after which some tier exceeded its cap), ``memory_lost`` (tokens and frames
    that found no room below it: the tiers enforce the cap, so that a memory that never compresses violates
    nothing), ``memory_growth``,
    ``written_per_byte_taken_in`` (bytes of blocks and index written to the node per byte of KV received),
    ``bytes_written_per_byte_kept`` (bytes of blocks written per byte of tokens ever stored), both also with ``kvmu``,
    and ``leak_at_ten_caps`` (growth over ten caps' worth of frames, as a share of the cap). Raises ``ConfigError`` for
    too few frames for a warm-up."""
    if args.frames < ROWS / WARM_UP:
        raise ConfigError(f"--frames must be at least {round(ROWS / WARM_UP)}, to leave room for a warm-up")
    figures, rows = _watch(args.frames, MemorySpec(cap_bytes=CAP_BYTES))
    once, more = _watch(args.frames, MemorySpec(cap_bytes=CAP_BYTES, organiser="kvmu"))
    for name in ("cap_violations", "memory_lost"):
        figures[name] += once[name]
    for name in ("written_per_byte_taken_in", "bytes_written_per_byte_kept"):
        figures[f"{name}_kvmu"] = once[name]
    note = (
        f"{args.frames} synthetic frames ({SHAPE}), cap {CAP_BYTES / 2**20:g} MiB, {MemorySpec().compressor}; most_*: "
        f"largest since the previous row; warm after {round(args.frames * WARM_UP)} frames"
    )
    figures["leak_at_ten_caps"] = leak(round(args.leak_cap_mib * 2**20))
    return BenchResult(figures, rows + more, [note])


class CountingArena(Arena):
    """Counts bytes of KV written in blocks (``written``), and the part in tokens stored for the first time (``first``):
    of frames newer than any in the head's earlier blocks; such tokens arrive in a single call."""

    written = first = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._newest: dict[tuple[int, int], int] = {}

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        outcomes = super().store(items)
        newest = dict(self._newest)
        for (key, block), outcome in zip(items, outcomes, strict=True):
            if outcome is Outcome.HIT and block.key.dtype != torch.uint8:
                head = key.layer, key.head
                new = int((block.frame > self._newest.get(head, -1)).sum())
                self.written += block.nbytes
                self.first += new * (block.nbytes // len(block))
                newest[head] = max(newest.get(head, -1), int(block.frame.max()))
        self._newest = newest
        return outcomes


def _memory(spec: MemorySpec) -> tuple[StreamMemory, Arena, CountingArena]:
    """A memory on host memory and a node tier."""
    cap = spec.cap_bytes
    host = Arena(max(_SLAB, cap // 2), slab_bytes=_SLAB)
    # More than the cap, to which the stream itself is limited: slabs may be partly empty, and each is for one of some
    # forty sizes of blocks.
    node = CountingArena(2 * cap + 40 * _SLAB, name="node", stream_bytes=cap, evicts=False, slab_bytes=_SLAB)
    return StreamMemory(CAMERA, spec, TierStack([host, node])), host, node


def _watch(frames: int, spec: MemorySpec) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Fill one memory; returns its figures and rows."""
    memory, host, node = _memory(spec)
    process = psutil.Process()
    warm = round(frames * WARM_UP)
    warm_rss = violations = taken = 0
    most = {"host": 0, "node": 0}
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for number, chunk in enumerate(made_chunks(CAMERA, frames, **SHAPE), start=1):
        memory.add_chunk(chunk)
        taken += chunk.key.nbytes + chunk.value.nbytes
        held = {tier.name: tier.nbytes(CAMERA) for tier in (host, node)}
        violations += held["host"] > CAP_BYTES // 2 or held["node"] > CAP_BYTES
        most = {name: max(most[name], held[name]) for name in most}
        if number == warm:
            gc.collect()
            warm_rss = process.memory_info().rss
        if number % (frames // ROWS) == 0:
            gc.collect()
            rows.append(
                {
                    "organiser": spec.organiser,
                    "frames": number,
                    "frames_held": memory.frames,
                    "tokens": memory.tokens,
                    "clusters": sum(len(head.organiser.table) for _, _, head in memory.iter_heads()),
                    "compressions": memory.counts.compressions,
                    "lost": memory.counts.lost + memory.counts.frames_dropped,
                    **{f"most_{name}_kib": round(nbytes / 2**10) for name, nbytes in most.items()},
                    "rss_mib": round(process.memory_info().rss / 2**20, 1),
                    "ms_per_frame": (time.perf_counter() - began) / number * 1000,
                }
            )
            print_progress(f"cap: {number}/{frames} frames, {rows[-1]['rss_mib']} MiB")
            most = dict.fromkeys(most, 0)
    figures = {
        "cap_violations": float(violations),
        "memory_lost": float(rows[-1]["lost"]),
        "memory_growth": (process.memory_info().rss - warm_rss) / warm_rss,
        "written_per_byte_taken_in": node.state().counts["bytes_in"] / taken,
        "bytes_written_per_byte_kept": node.written / node.first,
    }
    memory.tiers.close()
    return figures, rows


def leak(cap_bytes: int) -> float:
    """Growth of the process's peak memory while a full memory stores ten times its cap in frames, as a share of the
    cap."""
    memory, _, _ = _memory(MemorySpec(cap_bytes=cap_bytes))
    process, taken = psutil.Process(), 0
    # Compare peaks, since the temporary memory of compressions would distort single readings.
    most = dict.fromkeys((1, 11), 0)
    for chunk in made_chunks(CAMERA, sys.maxsize, **LEAK_SHAPE):
        memory.add_chunk(chunk)
        taken += chunk.key.nbytes + chunk.value.nbytes
        caps = taken // cap_bytes
        if caps in most:
            most[caps] = max(most[caps], process.memory_info().rss)
        elif caps > 11:
            break
    memory.tiers.close()
    return (most[11] - most[1]) / cap_bytes
