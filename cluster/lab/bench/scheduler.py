"""Placement, window queues, ladder and admission: production scheduling code in simulated time.

Costs and ladder come from files; only the decisions are timed, on one core.
"""

import argparse
import copy
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.control import costs as cost_models
from cluster.control.costs import CostModel
from cluster.control.demand import Demand, Measured, load
from cluster.control.fleet_settings import FleetSettings
from cluster.control.ladder import Ladder
from cluster.control.placement import Placement
from cluster.lab.bench.harness import BenchResult, positive, print_progress
from cluster.lab.city.city import simulate
from cluster.lab.city.mix import CameraClass, Mix
from cluster.lab.city.plan import FULL, CityPlan, PoolPlan, Timing
from cluster.lab.city.result import CityResult
from cluster.models.catalog import locate
from cluster.replica.window_queue import WindowQueue
from cluster.types import MICROSECONDS, WindowRequest
from cluster.types.cameras import Priority

STRIDE_S = 8.0
WARMUP_S = 120.0
"""Seconds at the start that do not count: every camera's first windows are computed even without motion."""
COSTS = "qwen2.5-vl-7b-h100"
LOADS = ((2.0, "queue alone"), (2.0, "ladder"), (1.5, "queue alone"), (1.5, "random drops"), (1.5, "ladder"))
"""Load relative to a replica's capacity, and how the overload is handled."""
DROPS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Extra random drops tried, as shares of a replica's capacity."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument("--streams", type=positive, default=10_000, metavar="N", help="cameras")
    parser.add_argument("--replicas", type=positive, default=64, metavar="N", help="replicas")
    parser.add_argument("--ladder", default="demo", metavar="NAME", help="ladder: demo, a model's folder, or a file")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="simulated seconds")
    parser.add_argument("--seed", type=int, default=0, metavar="S")


def run(args: argparse.Namespace) -> BenchResult:
    """Figures ``schedule_us_per_window``, ``placement_balance``, ``moved_on_loss``, ``deadline_misses_critical`` and
    ``ladder_vs_drop``."""
    costs = cost_models.load(COSTS)
    ladder = Ladder.load(Path(locate(args.ladder)))
    figures: dict[str, float] = {}
    print_progress("placement")
    table = _place_cameras(args, costs, ladder)
    figures["placement_balance"] = table.max_over_mean
    shares = _moved_shares(table)
    figures["moved_on_loss"] = max(shares)
    print_progress("decisions")
    figures["schedule_us_per_window"], parts = _time_decisions(args, costs, ladder)
    runs = {f"{over:g}x, {how}": _simulate_overload(args, costs, ladder, over, how) for over, how in LOADS}
    rows = [_row(name, each, priority) for name, each in runs.items() for priority in Priority]
    figures["deadline_misses_critical"] = float(
        sum(
            row["late"] + row["left_out"] + row["dropped"]
            for row in rows
            if row["class"] == Priority.CRITICAL and row["load"].startswith("2x")
        )
    )
    quality = {name: each.figures.quality for name, each in runs.items()}
    figures["ladder_vs_drop"] = quality["1.5x, ladder"] / quality["1.5x, random drops"]
    figures["silent_losses"] = float(sum(abs(each.balance.missing) for each in runs.values()))
    notes = [
        f"{args.streams} cameras of unequal cost on {args.replicas} replicas",
        f"costs: {costs.source}; ladder: {ladder.source}",
        f"moved_on_loss is the worst of {args.replicas} replica deaths; their mean is {statistics.fmean(shares):.3f}",
        "microseconds per window: " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items()),
        "quality: share of the video that was answered, weighted by the answers' F1 ratios; windows that a longer "
        "stride leaves out, and shed or dropped ones, count as unanswered",
        *(f"{name}: quality {each:.3f}" for name, each in quality.items()),
    ]
    return BenchResult(figures, rows, notes)


def demands(count: int, seed: int) -> list[Demand]:
    """Cameras of unequal cost: three picture sizes, quiet and busy scenes, one to six questions, three priorities."""
    draw = random.Random(seed)
    return [
        Demand(
            f"camera-{number}",
            draw.choices(list(Priority), [0.1, 0.6, 0.3])[0],
            stride_s=STRIDE_S,
            frame_tokens=draw.choice([144, 256, 400]),
            questions=draw.randint(1, 6),
            kept=min(1.0, draw.lognormvariate(-1.8, 0.6)),
            busy=draw.uniform(0.2, 1.0),
        )
        for number in range(count)
    ]


def _place_cameras(args: argparse.Namespace, costs: CostModel, ladder: Ladder) -> Placement:
    table = Placement()
    for number in range(args.replicas):
        table.join(f"replica-{number}")
    for demand in demands(args.streams, args.seed):
        table.add(demand.camera, weight=load(demand, ladder.rungs[0], costs))
    return table


def _moved_shares(table: Placement) -> list[float]:
    """Cameras that move when a member dies, relative to an even share, for each member."""
    members = table.members
    keys = sum(len(table.keys(member)) for member in members)
    return [len(copy.deepcopy(table).leave(member)) * len(members) / keys for member in members]


def _time_decisions(args: argparse.Namespace, costs: CostModel, ladder: Ladder) -> tuple[float, dict[str, float]]:
    """Decision microseconds per window of one controller and all its replicas' queues, in total and by part."""
    fleet = FleetSettings(costs, ladder).fleet()
    for number in range(args.replicas):
        fleet.join(f"replica-{number}")
    draw = random.Random(args.seed)
    asked = demands(args.streams, args.seed)
    for demand in asked:
        fleet.admit(demand, 0.0, force=True)
    queues = {name: WindowQueue() for name in fleet.replicas}
    phases = ((draw.random() * STRIDE_S, demand) for demand in asked)
    order = sorted(phases, key=lambda each: each[0])
    spent = {"queue": 0.0, "counts": 0.0, "tick": 0.0}
    # A camera's counts are processed once per stride.
    strides = 4
    for stride in range(strides):
        for second in range(int(STRIDE_S)):
            due = [(stride * STRIDE_S + offset, demand) for offset, demand in order if second <= offset < second + 1]
            windows = []
            for now_s, demand in due:
                end = round(now_s * MICROSECONDS)
                request = WindowRequest(demand.camera, stride, end - 1, end, now_s)
                queue = queues[fleet.plan(demand.camera).owner or ""]
                # Random gating and token counts.
                gated = draw.random() >= demand.busy
                tokens = round(2560 * min(1.0, demand.kept * draw.uniform(0.6, 1.4)))
                counts = Measured(STRIDE_S, 1, int(gated), 2560, tokens)
                windows.append((queue, request, demand.priority, demand.camera, counts))
            reports = [(name, draw.uniform(0.6, 0.9)) for name in queues]
            now_s = stride * STRIDE_S + second + 1
            began = time.process_time()
            for queue, request, priority, _, _ in windows:
                queue.offer(request, stride_s=STRIDE_S, late_s=40.0, priority=priority, seconds=0.05)
                if len(queue) >= 4:
                    queue.take_batch(8, request.arrived_s, 0.5)
            queued = time.process_time()
            for _, _, _, camera, counts in windows:
                fleet.observe_counts(camera, counts)
            counted = time.process_time()
            for name, share in reports:
                fleet.replica_report(name, busy_share=share, backlog_s=0.2, now_s=now_s)
            fleet.tick(now_s)
            spent["queue"] += queued - began
            spent["counts"] += counted - queued
            spent["tick"] += time.process_time() - counted
    windows_in_all = strides * len(order)
    parts = {name: 1e6 * seconds / windows_in_all for name, seconds in spent.items()}
    return sum(parts.values()), parts


def overloaded(
    cameras: Sequence[Demand],
    costs: CostModel,
    ladder: Ladder,
    *,
    seconds: float = 600.0,
    drop: float = 0.0,
    seed: int = 0,
) -> CityResult:
    """Simulate one replica with all of these cameras, at the same phases whatever the handling; none is refused."""
    plan = CityPlan(
        cameras=len(cameras),
        pools=(PoolPlan(costs.device, 1, costs),),
        mix=Mix(classes=[CameraClass.of(demand, 1) for demand in cameras]),
        mix_name="bench",
        ladder=ladder,
        ladder_name="bench",
        timing=Timing(WARMUP_S + seconds),
        warmup_s=WARMUP_S,
        seed=seed,
        force=True,
        phases=tuple(number * 0.6180339887498949 % 1 for number in range(len(cameras))),
        drop=drop,
    )
    return simulate(plan)


def _simulate_overload(args: argparse.Namespace, costs: CostModel, ladder: Ladder, over: float, how: str) -> CityResult:
    """Simulate one replica at ``over`` times its capacity."""
    print_progress(f"one replica at {over:g} times its capacity: {how}")
    cameras: list[Demand] = []
    total = 0.0
    for demand in demands(args.streams, args.seed + 1):
        if total >= over:
            break
        total += load(demand, ladder.rungs[0], costs)
        cameras.append(demand)
    # Frames of a dropped window are computed with the next one, so that dropping exactly the excess is not enough: try
    # larger shares, too, and take the best.
    drops = [1 - (1 - share) / total for share in DROPS] if how == "random drops" else [0.0]
    rungs = ladder if how == "ladder" else FULL
    found = [overloaded(cameras, costs, rungs, seconds=args.seconds, drop=drop, seed=args.seed) for drop in drops]
    return max(found, key=lambda each: each.figures.quality)


def _row(name: str, run: CityResult, priority: Priority) -> dict[str, Any]:
    """``due`` counts windows at the configured stride, including those left out by a longer stride or shedding."""
    tally, figures, part = run.tally, run.by_priority()[priority], np.s_[run.first :, priority.rank]
    due = round(float(tally.due_s[part].sum()) / STRIDE_S)
    answered, on_time, gated = (int(table[part].sum()) for table in (tally.answered, tally.on_time, tally.gated))
    dropped = dict(figures.dropped)
    shed = dropped.pop("shed", 0)
    return {
        "load": name,
        "class": str(priority),
        "due": due,
        "answered": answered + gated,
        "late": answered - on_time,
        "left_out": due - figures.windows + shed,
        "dropped": sum(dropped.values()),
        "lag_p50_s": figures.lag_p50_s,
        "lag_p99_s": figures.lag_p99_s,
        "quality": figures.quality,
    }
