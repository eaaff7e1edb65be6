"""Memory under a cap: cost, contents, coverage, retrieval and restoring, in parts with a table each.

* ``cap``: bytes against the cap over 100,000 frames
* ``compress``: time of compressors relative to encoding
* ``coverage``: distances of all tokens to the nearest held ones
* ``day``: bytes of a camera's day, and questions after hours and after minutes
* ``evidence``: objects of synthetic hours that are still held
* ``infinipot_v``: kept tokens against InfiniPot-V's rule
* ``frames``: what frames retrieve from the past, and its cost
* ``retrieval``: clusters against single tokens
* ``objects``: kept tokens of moving objects
* ``rekv``: retrieved frames against ReKV's rule
* ``history``: questions over long and short histories
* ``prefetch``: transfers hidden behind layers
* ``splits``: savings of deferred cluster splits
* ``restore``: restoring against recomputing
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster.files import check_writable
from cluster.lab.bench.frames import add_clip_arguments
from cluster.lab.bench.harness import BenchResult, Goals, run_parts
from cluster.lab.bench.memory import (
    cap,
    compressors,
    evidence,
    frames,
    history,
    prefetch,
    published,
    restore,
    retrieval,
    splits,
)
from cluster.lab.bench.memory.footage import Footage

PARTS: dict[str, Callable[[Footage], BenchResult]] = {
    # First, because memory freed by other parts would hide its growth.
    "cap": lambda footage: cap.measure(footage.args),
    "compress": compressors.measure_cost,
    "coverage": compressors.measure_coverage,
    "day": history.measure_day,
    "evidence": evidence.measure,
    "objects": compressors.measure_objects,
    "infinipot_v": lambda _footage: published.measure_infinipot_v(),
    "frames": frames.measure,
    "retrieval": retrieval.measure,
    "rekv": published.measure_rekv,
    "history": history.measure_history,
    "prefetch": prefetch.measure,
    "splits": splits.measure,
    "restore": restore.measure,
}


GOALS: Goals = {
    "cap_violations": ("<=", 0.0),
    "memory_lost": ("<=", 0.0),
    "memory_growth": ("<=", 0.01),
    "leak_at_ten_caps": ("<=", 0.1),
    "compress_share_production": ("<=", 0.02),
    "compress_share_novelty": ("<=", 0.02),
    "compress_share_infinipot_v": ("<=", 0.01),
    "compress_share_cords": ("<=", 0.02),
    "object_kept_cords_quarter": (">=", 0.95),
    "bytes_per_camera_day": ("<=", 1.0),
    "ttft_8h_over_10min": ("<=", 1.5),
    "evidence_recall_eighth": (">=", 0.95),
    "evidence_recall_64th": (">=", 0.80),
    "evidence_gain_eighth": (">=", 0.0),
    "evidence_gain_64th": (">=", 0.0),
    "infinipot_v_parity": (">=", 1.0),
    "frames_read_share": ("<=", 0.361),
    "frames_attention_read": (">=", 0.3),
    "frames_time_ratio": ("<=", 1.5),
    "ttft_vs_token_retrieval": (">=", 2.0),
    "transfers_vs_token_retrieval": (">=", 5.0),
    "ttft_vs_rekv": (">=", 1.5),
    "rekv_parity": (">=", 1.0),
    "ttft_64k_over_4k": ("<=", 2.0),
    "prediction_recall": (">=", 0.8),
    "prefetch_hidden_real": (">=", 0.6),
    "prefetch_hidden_1ms": (">=", 0.8),
    "prefetch_hidden_5ms": (">=", 0.8),
    "prefetch_hidden_20ms": (">=", 0.8),
    "deferred_split_saving": (">=", 0.4),
    "restore_speedup": (">=", 10.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument("--part", nargs="+", choices=list(PARTS), metavar="NAME", help=f"from: {', '.join(PARTS)}")
    add_clip_arguments(parser, model="demo", window=20.0, stride=4.0)
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="length of each clip")
    parser.add_argument("--bench-model", default="bench-qwen2_5_vl", help="larger preset in parts compress, prefetch")
    parser.add_argument("--object-seconds", type=float, default=96.0, metavar="S", help="clip length in part objects")
    parser.add_argument(
        "--caps", type=int, nargs="+", default=compressors.CAPS, metavar="N", help="caps in tokens, in part compress"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the prefetch timeline there (SVG)")
    cap.add_arguments(parser)
    evidence.add_arguments(parser)
    history.add_arguments(parser)
    prefetch.add_arguments(parser)


def run(args: argparse.Namespace) -> BenchResult:
    """Measure the named parts, or all."""
    if args.out is not None:
        check_writable(args.out)
    with tempfile.TemporaryDirectory() as directory:
        footage = Footage(args, Path(directory))
        return run_parts({name: partial(PARTS[name], footage) for name in args.part or PARTS}, GOALS)
