"""Fits a cost model to step times of the native engine over windows and batches of many sizes, for placement, admission
and the city simulator.

``--platform`` computes a cost model from a GPU's peak numbers instead, for hardware that is not available.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.control.costs import LEAST_STEPS, CostModel, WindowWork, fit, save
from cluster.engine.native import NativeEngine
from cluster.engine.native.passes import pass_rows
from cluster.engine.window.kv import MEMORY_SHARE, embedding_bytes, gpu_pool_bytes
from cluster.errors import ConfigError
from cluster.files import check_file_writable
from cluster.lab.bench.harness import BenchResult, add_model_arguments, machine, positive, print_progress
from cluster.lab.bench.soak import SyntheticCamera
from cluster.lab.planning.accelerator import platforms
from cluster.lab.planning.model_card import HALF, kv_token_bytes
from cluster.models.checkpoint import linear_weights
from cluster.models.loading import load_model, load_shape
from cluster.types import Question, StreamSpec

PLATFORMS = ("a100", "h100", "h200")

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"

LINEAR, ATTENTION, MEMORY = 0.50, 0.30, 0.80
"""Achieved shares of peak FLOP/s (steps of thousands of rows) and of bandwidth (as in ``cluster.lab.planning``)."""

LAUNCH_S = 25e-6
"""Kernel launches and host work of one layer, per step."""

WINDOW_S = 1.0e-3
"""Planning, rotation and readout of one window on a CPU core; not overlapped with kernels."""

PATCHES = 1024
"""Patches of a 448 x 448 picture. A few of the tower's layers attend over all of them, the others in windows."""

HOST_BYTES = 16 * 2**30
"""Host memory for windows between their strides, as the chart's values for these GPUs reserve."""

ERROR = 0.35
"""Half the range of published shares of peak; not a measured error."""


def platform_costs(name: str) -> CostModel:
    """Cost model of one GPU from its peak numbers. Raises ``ConfigError`` for an unknown platform."""
    platform = platforms.get(name)
    linear, attention = platform.flops * LINEAR, platform.flops * ATTENTION
    shape = load_shape(MODEL)
    config, visual = shape.model.config.vision_config, shape.model.model.visual
    full = len(config.fullatt_block_indexes)
    seen = full * PATCHES + (config.depth - full) * (config.window_size // config.patch_size) ** 2
    merge = config.spatial_merge_size**2
    of_token = merge * linear_weights(visual.blocks) + linear_weights(visual.merger)
    source = (
        f"computed, not measured: {MODEL} in BF16 at {LINEAR:.0%} of the {platform.title}'s peak in products and "
        f"{ATTENTION:.0%} in attention ({platform.source}); sightline bench cost --platform {name}"
    )
    slot = kv_token_bytes(shape)
    # As the engine sizes its pool once weights are loaded, leaving a share for memories.
    free = platform.memory_bytes - HALF * sum(weight.numel() for weight in shape.model.parameters())
    pool = gpu_pool_bytes(shape, int((1 - MEMORY_SHARE) * free), slot, pass_rows(torch.device("cuda")))
    return CostModel(
        model=MODEL,
        device=platform.title,
        source=source,
        # Weights are read once per step; with thousands of rows the products hide it, so that launches dominate.
        step_s=LAUNCH_S * (len(shape.layers) + config.depth)
        + 2.0 * linear_weights(shape.model) / (platform.memory * MEMORY),
        window_s=WINDOW_S,
        encoded_s=2.0 * of_token / linear + 4.0 * merge * config.hidden_size * seen / attention,
        # Nearly all rows are a window's, whose last layer is mostly omitted.
        computed_s=shape.llm_flops(1, 0, (1, 0)) / linear,
        attended_s=shape.llm_flops(0, 1, (0, 1)) / attention,
        spread=0.10,
        error=ERROR,
        window_tokens=pool // slot + HOST_BYTES // (slot + embedding_bytes(shape)),
    )


TEXTS = (
    "Is a person or a car moving in this picture?",
    "Did anyone leave something behind?",
    "Is someone on the ground?",
    "Are people running away from something?",
)
SIDES = (112, 140, 168, 196, 224)
# Not a divisor of the default number of sizes, so that mixes of several sizes are held out.
HELD_OUT = 5
"""Every fifth mix is held out of the fit as a whole, because its steps are alike; ``cost_error`` is theirs."""

Timed = tuple[list[WindowWork], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    add_model_arguments(parser, "demo")
    parser.add_argument("--rounds", type=positive, default=24, metavar="N", help="camera mixes")
    parser.add_argument("--windows", type=positive, default=5, metavar="N", help="windows per camera")
    parser.add_argument("--max-batch", type=positive, default=8, metavar="N", help="largest step")
    parser.add_argument("--platform", choices=PLATFORMS, help="compute it for Qwen2.5-VL-7B on this GPU instead")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the cost model")


def run(args: argparse.Namespace) -> BenchResult:
    """Figures ``cost_error`` (see ``unseen_error``) and ``cost_spread``."""
    if args.out is not None:
        check_file_writable(args.out)
    if args.platform:
        costs = platform_costs(args.platform)
        rows = [_row(costs, 0, 0)]
        result = BenchResult({"cost_error": costs.error, "cost_spread": costs.spread}, rows, [costs.source])
    else:
        costs, result = _measured(args)
    if args.out is not None:
        save(costs, args.out)
        result.notes.append(f"cost model written to {args.out}")
    return result


def _measured(args: argparse.Namespace) -> tuple[CostModel, BenchResult]:
    fitted = args.windows * sum(number % HELD_OUT > 0 for number in range(args.rounds))
    if fitted < LEAST_STEPS:
        given = f"{args.rounds} rounds of {args.windows} leave {fitted}; raise --rounds or --windows"
        raise ConfigError(f"a fit needs at least {LEAST_STEPS} timed steps, and {given}")
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    random = np.random.default_rng(1)
    mixes: list[list[Timed]] = []
    held = 0.0
    for number in range(args.rounds):
        # A mix of cameras whose windows end together; step sizes cycle from 1 to --max-batch.
        engine = NativeEngine(model)
        held = max(held, engine.window_tokens)
        mixes.append(_mix(engine, args, 1 + number % args.max_batch, random))
        print_progress(f"mix {number + 1}/{args.rounds}: {len(mixes[-1])} steps")
    steps = [step for mix in mixes for step in mix]
    kind = machine()["gpu"] if args.device.startswith("cuda") else "cpu"
    source = (
        f"fitted to {len(steps)} steps of the native engine by sightline bench cost: {args.device}, {args.dtype}, "
        f"{torch.get_num_threads()} threads"
    )
    names: dict[str, Any] = {"model": args.model, "device": str(kind), "source": source}
    costs = replace(fit(steps, **names), window_tokens=held)
    figures = {"cost_error": unseen_error(mixes, **names), "cost_spread": costs.spread}
    rows = [_row(costs, len(steps), max(len(works) for works, _ in steps))]
    return costs, BenchResult(figures, rows, [source])


def unseen_error(mixes: Sequence[Sequence[Timed]], **names: Any) -> float:
    """Median relative error over the steps of held-out mixes."""
    known = fit([step for number, mix in enumerate(mixes) if number % HELD_OUT for step in mix], **names)
    return float(
        np.median([abs(known.seconds(works) / seconds - 1) for mix in mixes[::HELD_OUT] for works, seconds in mix])
    )


def _row(costs: CostModel, steps: int, largest: int) -> dict[str, Any]:
    return {
        "model": costs.model,
        "device": costs.device,
        "steps": steps,
        "largest": largest,
        "step_ms": 1e3 * costs.step_s,
        "window_ms": 1e3 * costs.window_s,
        "encoded_us": 1e6 * costs.encoded_s,
        "computed_us": 1e6 * costs.computed_s,
        "attended_ns": 1e9 * costs.attended_s,
        "error": costs.error,
        "spread": costs.spread,
    }


def _mix(engine: NativeEngine, args: argparse.Namespace, size: int, random: np.random.Generator) -> list[Timed]:
    """Time steps of ``size`` cameras with random pictures, kept shares, questions and refresh budgets."""
    cameras = []
    for number in range(size):
        side = int(random.choice(SIDES))
        kept = float(random.uniform(0.02, 0.6))
        camera = SyntheticCamera(
            f"camera-{number}", engine.geometry, width=side, height=side, kept=kept, seed=int(random.integers(1 << 30))
        )
        questions = tuple(Question(f"q{i}", text) for i, text in enumerate(TEXTS[: int(random.integers(1, 5))]))
        budget = float(random.choice([0.0, 0.1, 0.4]))
        spec = StreamSpec(
            camera.stream,
            questions,
            window_s=float(random.choice([16.0, 24.0])),
            refresh="budget",
            refresh_budget=budget,
            static_gate=False,
        )
        engine.admit(spec)
        cameras.append(camera)
    # With one thread, use its CPU time, which excludes other load on the machine.
    clock = time.thread_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    found: list[Timed] = []
    for frame in range(1000):
        samples = [camera.sample(frame) for camera in cameras]
        requests = [request for sample in samples for request in engine.push(sample)]
        if not requests:
            continue
        began = clock()
        engine.step(requests)
        seconds = clock() - began
        works = [WindowWork(w.tokens.encoded, w.computed, w.attended) for w in engine.stats.windows]
        found.append((works, seconds))
        if len(found) > args.windows:
            break
    # The first step of an engine warms up caches.
    return found[1:]
