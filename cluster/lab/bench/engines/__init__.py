"""Engines side by side: same clips, same weights, same windows, one run.

*Full* computes every token of every window and encodes each frame once. *Pruned* computes the kept tokens of every
window. *Ours* keeps the KV of the last window and refreshes a part of it. All streams of a batch close a window
together; each engine answers the batch in one step, one engine after the other. Latency is last frame in -> answers:
nothing of a stride is encoded before its last frame has come, in any engine.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cluster.lab.bench.engines.contestants import CONTESTANTS, Contestant, check
from cluster.lab.bench.engines.interleaved import Entrant, Measured, run_interleaved
from cluster.lab.bench.frames import add_clip_arguments, clip_names, made_clips, prune_clip, read_clip
from cluster.lab.bench.harness import BenchResult, mean_logit_diff, print_progress
from cluster.models import load_model
from cluster.types import Answer, FrameSample, PatchGeometry, Question, StreamSpec

QUESTION = Question("q", "Is a person or a car moving in this picture?")
REFERENCE = "native_full"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the harness."""
    add_clip_arguments(parser, model="bench-qwen2_5_vl", window=40.0, stride=8.0)
    parser.add_argument("--windows", type=int, default=3, metavar="N", help="windows counted (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=list(CONTESTANTS), metavar="NAME", help=f"of: {', '.join(CONTESTANTS)}"
    )


def run(args: argparse.Namespace) -> BenchResult:
    """Measure all contestants on all clips at once, one clip a stream."""
    chosen = [CONTESTANTS[name] for name in args.only or CONTESTANTS]
    check(chosen)
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        clips = args.clips or made_clips(Path(directory))
        whole, pruned = _samples(clips, model.geometry, args)
        entrants = [
            Entrant(contestant, running.enter_context(contestant.start(model)), whole if contestant.whole else pruned)
            for contestant in chosen
        ]
        spec = StreamSpec("", (QUESTION,), args.window, args.stride, static_gate=False)
        run_interleaved(entrants, spec, print_progress)
    measured = {entrant.contestant.name: entrant.measured for entrant in entrants}
    rows = [_row(contestant, measured) for contestant in chosen]
    parameters = sum(p.numel() for p in model.model.parameters())
    notes = [
        f"model {args.model}: {parameters / 1e6:.1f}M parameters, random weights: {model.random_weights}",
        f"{len(clips)} streams in a batch: {', '.join(path.stem for path in clips)}; "
        f"window {args.window:g} s, stride {args.stride:g} s, {args.fps:g} FPS, pruner {args.pruner}",
        *(f"{contestant.name}: {contestant.what}" for contestant in chosen),
    ]
    return BenchResult("engines", figures_of(measured), rows, notes)


def _samples(
    clips: Sequence[Path], geometry: PatchGeometry, args: argparse.Namespace
) -> tuple[list[list[FrameSample]], list[list[FrameSample]]]:
    """What a decoder would send of each clip: with every patch, and pruned."""
    seconds = args.window + args.windows * args.stride
    whole: list[list[FrameSample]] = []
    pruned: list[list[FrameSample]] = []
    for name, path in clip_names(list(clips)):
        clip = read_clip(path, geometry, fps=args.fps, at_least=seconds, at_most=seconds)
        whole.append(prune_clip(clip, name, "none").samples)
        pruned.append(prune_clip(clip, name, args.pruner).samples)
    return whole, pruned


FIGURES: dict[str, tuple[str, str]] = {
    # Seconds of the first over seconds of the second.
    "native_over_vllm_full": ("vllm_full", "native"),
    "vllm_pruned_over_vllm_full": ("vllm_full", "vllm_pruned"),
    # The same work on both sides: nothing cached but frames' embeddings.
    "native_full_vs_vllm_full": ("vllm_full_uncached", "native_full"),
}


def figures_of(measured: Mapping[str, Measured]) -> dict[str, float]:
    """Ratios of those that ran, and vLLM's own hit rate as a full window slides. Batches are equal, so a ratio of
    latencies is one of throughputs."""
    figures = {
        figure: measured[slow].latency_s / measured[fast].latency_s
        for figure, (slow, fast) in FIGURES.items()
        if slow in measured and fast in measured
    }
    hit_rate = measured["vllm_full"].hit_rate if "vllm_full" in measured else None
    if hit_rate is not None:
        figures["prefix_cache_hit_rate_sliding"] = hit_rate
    return figures


def _row(contestant: Contestant, all_measured: Mapping[str, Measured]) -> dict[str, Any]:
    """``logit_diff``: |logit P(yes) - the reference's|; ``gflops``: tower and language model."""
    measured = all_measured[contestant.name]
    reference = all_measured.get(REFERENCE)
    pairs = [] if reference is None else list(zip(_sorted(reference), _sorted(measured), strict=True))
    return {
        "engine": contestant.name,
        "windows": len(measured.windows),
        "full": round(measured.mean(lambda w: w.tokens.full)),
        "kept": round(measured.mean(lambda w: w.tokens.kept)),
        "computed": round(measured.mean(lambda w: w.computed)),
        "encoded": round(measured.mean(lambda w: w.tokens.encoded)),
        "gflops": round(measured.mean(lambda w: w.tower_flops + w.llm_flops) / 1e9, 1),
        "vision_s": round(measured.mean(lambda w: w.timing.vision_s), 3),
        "llm_s": round(measured.mean(lambda w: w.timing.llm_s), 3),
        "latency_s": round(measured.latency_s, 3),
        "prefix_hits": None if measured.hit_rate is None else round(measured.hit_rate, 4),
        "windows_per_s": round(measured.windows_per_s, 3),
        "logit_diff": round(mean_logit_diff((a.score, b.score) for a, b in pairs), 4) if pairs else None,
        "agreement": round(statistics.fmean(a.positive == b.positive for a, b in pairs), 3) if pairs else None,
    }


def _sorted(measured: Measured) -> list[Answer]:
    return sorted(measured.answers, key=lambda answer: (answer.stream, answer.window, answer.question))
