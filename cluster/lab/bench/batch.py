"""Batched steps against one step per stream on the native engine: the gain from batching small pruned windows.

Two engines over one model receive the same frames. When the windows of all streams close, one engine answers them in
one step and the other in a step each. The order alternates, so that a machine that slows down slows both. Answers must
agree up to rounding.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

from cluster.engine.native import NativeEngine
from cluster.lab.bench.harness import BenchResult, add_model_arguments, positive, print_progress, run_alternating
from cluster.lab.bench.soak import SyntheticCamera
from cluster.lab.bench.window import QUESTION
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.types import Answer, StreamSpec, WindowRequest

# Scores may differ by rounding only: matrix products of other shapes sum in another order.
ROUNDING = 1e-3
# Side of the square pictures in pixels.
SIDES = (112, 168, 224)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument("--streams", type=positive, default=8, metavar="N", help="cameras")
    add_model_arguments(parser, "demo-qwen2_5_vl")
    parser.add_argument("--kept", type=float, default=0.1, help="share of tokens kept between anchors")
    parser.add_argument("--windows", type=positive, default=20, metavar="N", help="windows per camera")


def run(args: argparse.Namespace) -> BenchResult:
    """Figure ``batch_speedup``: time one by one over time batched, for the smallest pictures."""
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    rows = [_measure(model, args, side) for side in SIDES]
    notes = [
        f"{args.streams} streams, windows of 40 s every 8 s, 2 FPS; "
        "only small windows gain: once one window saturates the machine, batching does not help",
    ]
    figures = {"batch_speedup": rows[0]["speedup"], "largest_score_difference": max(r["score_diff"] for r in rows)}
    return BenchResult(figures, rows, notes)


def _measure(model: VisionLanguageModel, args: argparse.Namespace, side: int) -> dict[str, float]:
    cameras = [
        SyntheticCamera(f"cam{i}", model.geometry, width=side, height=side, kept=args.kept, seed=i)
        for i in range(args.streams)
    ]
    engines = [NativeEngine(model), NativeEngine(model)]
    for engine in engines:
        for camera in cameras:
            engine.admit(StreamSpec(camera.stream, (QUESTION,), static_gate=False))
    together, alone = engines
    together_s: list[float] = []
    alone_s: list[float] = []
    computed: list[int] = []
    difference = 0.0
    for samples in zip(*cameras, strict=True):
        requests = [request for sample in samples for request in together.push(sample)]
        for sample in samples:
            alone.push(sample)
        if not requests:
            continue
        at_once = partial(_step, together, [requests], together_s)
        one_by_one = partial(_step, alone, [[request] for request in requests], alone_s)
        joint, single = run_alternating(len(together_s), (at_once, one_by_one))
        for a, b in zip(joint, single, strict=True):
            difference = max(difference, abs(a.score - b.score))
            if (a.stream, a.window, a.tokens) != (b.stream, b.window, b.tokens) or difference > ROUNDING:
                # A speedup would be meaningless.
                raise AssertionError(f"{a.stream} window {a.window}: {a.score} together, {b.score} alone")
        computed += [answer.tokens.computed for answer in joint]
        print_progress(
            f"side {side}: window {len(together_s)}/{args.windows + 1}: "
            f"{alone_s[-1]:.3f} s one by one, {together_s[-1]:.3f} s together"
        )
        # The first window of each stream warms up caches and is not counted.
        if len(together_s) > args.windows:
            break
    return {
        "side": side,
        "streams": args.streams,
        "windows": args.windows,
        "computed_per_window": round(statistics.fmean(computed[args.streams :])),
        "one_by_one_s": round(statistics.median(alone_s[1:]), 4),
        "together_s": round(statistics.median(together_s[1:]), 4),
        "speedup": statistics.median(alone_s[1:]) / statistics.median(together_s[1:]),
        "score_diff": difference,
    }


def _step(engine: NativeEngine, batches: Sequence[Sequence[WindowRequest]], seconds: list[float]) -> list[Answer]:
    began = time.perf_counter()
    answers = [answer for batch in batches for answer in engine.step(batch)]
    seconds.append(time.perf_counter() - began)
    return answers
