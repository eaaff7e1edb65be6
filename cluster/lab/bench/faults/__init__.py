"""Fault injection into production code and processes: one part per fault, with a figure and a goal."""

import argparse
from functools import partial
from pathlib import Path

from cluster.lab.bench.harness import BenchResult, Goals, load_module, run_parts

PARTS: dict[str, str] = {
    "positions": "positions_wrong: every token's (t, row, col) against the published rule, reimplemented",
    "static_gate": "gate_missed: objects appearing in an anchor that do not reopen the static gate; quiet_gated",
    "packet_loss": "window_after_gap: share of a 40 s window still covered right after a packet loss of 1 s",
    "kill": "restored_after_kill: kill -9 at every write point of a memory in a node tier and in Redis",
    "outage": "restored_after_outage: restart while the lowest tier is unreachable",
    "step": "step_p90_ratio: step time with memories at their cap over that without memories",
    "cluster": "faults_survived: processes of a small real cluster killed and frozen",
    "gateway_attacks": "open_door_mb: memory growth of the gateway under attacks without a token",
    "secrets": "secrets_leaked: source passwords in outputs, logs, events, exports, metrics",
    "decoder": "decoder_bomb_mb: memory growth of a decoder under hostile streams",
    "delay": "other_camera_delay_ms: delay of a load while another camera's write takes 1.5 s",
}
"""Part -> figure and description. Each part is a module with ``measure(seed) -> BenchResult`` in this package or listed
in ``IN_CHECKOUT``."""

GOALS: Goals = {
    "positions_wrong": ("<=", 0.0),
    "gate_missed": ("<=", 0.0),
    "quiet_gated": (">=", 0.9),
    "window_after_gap": (">=", 0.95),
    "restored_after_kill": (">=", 1.0),
    "restored_after_outage": (">=", 1.0),
    "step_p90_ratio": ("<=", 1.2),
    "faults_survived": (">=", 1.0),
    "open_door_mb": ("<=", 64.0),
    "secrets_leaked": ("<=", 0.0),
    "decoder_bomb_mb": ("<=", 256.0),
    "other_camera_delay_ms": ("<=", 20.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    listing = "; ".join(f"{name} ({what})" for name, what in PARTS.items())
    parser.add_argument("--part", nargs="+", choices=list(PARTS), metavar="NAME", help=f"only these, of: {listing}")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    of_cluster = parser.add_argument_group("part cluster")
    of_cluster.add_argument("--fault", nargs="+", default=[], metavar="NAME", help="faults, such as freeze-decoder")
    of_cluster.add_argument("--repeat", type=int, default=1, metavar="N", help="rounds, each from the start")
    of_cluster.add_argument("--folder", type=Path, help="keep the cluster's files and logs in this folder")


def run(args: argparse.Namespace) -> BenchResult:
    """Measure the named parts, or all."""
    return run_parts({name: partial(_measure, name, args) for name in args.part or PARTS}, GOALS)


def _measure(name: str, args: argparse.Namespace) -> BenchResult:
    options = {"names": args.fault, "repeat": args.repeat, "folder": args.folder} if name == "cluster" else {}
    part: BenchResult = load_module(f"faults.{name}").measure(args.seed, **options)
    return part
