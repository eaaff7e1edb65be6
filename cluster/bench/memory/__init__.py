"""Memory: what it costs, holds, covers, finds and brings back, under a cap. Eight parts, each with its own table.

``compress``: time of compressors beside encoding; ``coverage``: what they hold of it; ``cap``: bytes against the cap
over a hundred thousand frames; ``retrieval``: clusters against tokens; ``history``: questions to much and to little of
it; ``prefetch``: transfers hidden behind layers; ``splits``: what deferring them saves; ``restore``: taken up against
computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.bench.frames import add_clip_arguments
from cluster.bench.harness import BenchResult, table
from cluster.bench.memory import cap, compress, coverage, history, prefetch, restore, retrieval, splits
from cluster.bench.memory.footage import Footage
from cluster.bench.memory.part import Part, against_goals

PARTS: dict[str, Callable[[Footage], Part]] = {
    # First: what it may grow by would hide in memory that other parts have freed.
    "cap": lambda footage: cap.measure(footage.args),
    "compress": compress.measure,
    "coverage": coverage.measure,
    "retrieval": retrieval.measure,
    "history": history.measure,
    "prefetch": prefetch.measure,
    "splits": splits.measure,
    "restore": restore.measure,
}


@dataclass(frozen=True, slots=True)
class MemoryResult(BenchResult):
    """``rows``: every figure against its goal; ``measured``: the rows behind them, each with its part's name. The JSON
    has the latter as ``rows``, the former as ``goals``."""

    measured: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """See :class:`BenchResult`."""
        body = {
            "bench": self.bench,
            "figures": self.figures,
            "goals": self.rows,
            "rows": self.measured,
            "notes": self.notes,
            "machine": self.machine,
        }
        return json.dumps(body, indent=2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the harness."""
    parser.add_argument("--part", nargs="+", choices=list(PARTS), metavar="NAME", help=f"of: {', '.join(PARTS)}")
    add_clip_arguments(parser, model="demo", window=20.0, stride=4.0)
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="of each clip (default: 120)")
    parser.add_argument(
        "--bench-model", default="bench-qwen2_5_vl", help="preset that compressing is held against (default: it)"
    )
    parser.add_argument(
        "--bench-seconds", type=float, default=60.0, metavar="S", help="of each clip it watches (default: 60)"
    )
    parser.add_argument(
        "--caps", type=int, nargs="+", default=compress.CAPS, metavar="N", help="tokens, in part compress"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the timeline of the prefetch there (SVG)")
    cap.add_arguments(parser)
    history.add_arguments(parser)
    prefetch.add_arguments(parser)


def run(args: argparse.Namespace) -> MemoryResult:
    """Measure the parts that were named, or all, one after the other; each prints its table as soon as it has it."""
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    figures: dict[str, float] = {}
    goals: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        footage = Footage(args, Path(directory))
        for name in args.part or PARTS:
            began = time.perf_counter()
            part = PARTS[name](footage)
            print(f"{name}\n{table(part.rows)}\n", flush=True)
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
            goals += against_goals(name, part.figures)
            measured += [{"part": name, **row} for row in part.rows]
            notes += [f"{name}: {note}" for note in part.notes]
            for figure, value in part.figures.items():
                # Two parts hold something against a cap.
                figures[figure] = figures.get(figure, 0.0) + value
    return MemoryResult("memory", figures, goals, notes, measured=measured)
