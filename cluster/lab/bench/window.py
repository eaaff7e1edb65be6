"""Full computation against pruned and refreshed windows: same engine, same weights, same clips, one run.

*Full* runs every frame of every window through the tower and the language model. *Ours* prunes, reuses position-free KV
and refreshes by policy. Both answer the same windows in alternation, so that a machine that slows down
slows both. Latency is from the last frame in to the answer: in neither is anything of a stride encoded before its last
frame has arrived. The same windows are also computed ahead, frame by frame, as for a live camera.
"""

import argparse
import itertools
import math
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.engine.base import Engine
from cluster.engine.native.engine import NativeEngine
from cluster.engine.window.step import WindowStats
from cluster.lab.bench.frames import (
    ClipFrames,
    add_clip_arguments,
    clip_names,
    made_clips,
    prune_clip,
    read_clip,
    span_seconds,
)
from cluster.lab.bench.harness import BenchResult, positive, print_progress
from cluster.lab.report.compare import answer_in_full
from cluster.models.loading import load_model
from cluster.registry import refresh_policies
from cluster.types import MICROSECONDS, Answer, FrameSample, Question, StreamSpec, WindowRequest

QUESTION = Question("q", "Is a person or a car moving in this picture?")
NATURAL = "anchors"
AHEAD = f"{NATURAL}, ahead"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    add_clip_arguments(parser, model="bench-qwen2_5_vl", window=40.0, stride=8.0)
    parser.add_argument("--windows", type=positive, help="windows after the first (default: all, at least 6)")
    parser.add_argument("--policies", nargs="+", choices=refresh_policies.names(), help="default: all")


@dataclass(slots=True)
class Measured:
    """Cost and answers of an engine's steps after the first whole window."""

    seconds: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    windows: list[WindowStats] = field(default_factory=list)

    def add(self, engine: Engine, seconds: float, answers: Sequence[Answer]) -> None:
        """Record the last step of ``engine``."""
        self.seconds.append(seconds)
        self.answers += answers
        self.windows += engine.stats.windows

    @property
    def latency_s(self) -> float:
        """Mean seconds from the last frame to the answers of a step."""
        return statistics.fmean(self.seconds)

    @property
    def window_s(self) -> float:
        """Mean seconds per window."""
        return sum(self.seconds) / len(self.windows)

    def mean(self, number: Callable[[WindowStats], float]) -> float:
        """Mean of a number over all windows."""
        return statistics.fmean(map(number, self.windows))

    @property
    def gflops(self) -> float:
        """Mean GFLOPs per window, tower and language model."""
        return self.mean(lambda window: window.tower_flops + window.llm_flops) / 1e9

    def columns(self) -> dict[str, Any]:
        """Columns of a table of engines or policies."""
        return {
            "windows": len(self.windows),
            "tokens_full": round(self.mean(lambda window: window.tokens.full)),
            "kept": round(self.mean(lambda window: window.tokens.kept)),
            "computed": round(self.mean(lambda window: window.computed)),
            "refreshed": round(self.mean(lambda window: window.tokens.refreshed)),
            "encoded": round(self.mean(lambda window: window.tokens.encoded)),
            "gflops": round(self.gflops, 1),
            "vision_s": round(self.mean(lambda window: window.timing.vision_s), 3),
            "llm_s": round(self.mean(lambda window: window.timing.llm_s), 3),
            "latency_s": round(self.latency_s, 3),
        }

    def logit_diff(self, reference: "Measured") -> float:
        """Mean ``|logit(a) - logit(b)|`` of paired scores, clipped to [1e-9, 1 - 1e-9]."""
        return statistics.fmean(abs(_logit(a) - _logit(b)) for a, b in self._pairs(reference))

    def agreement(self, reference: "Measured") -> float:
        """Share of answers equal to the reference's."""
        return statistics.fmean(a.positive == b.positive for a, b in self._pairs(reference))

    def _pairs(self, reference: "Measured") -> Iterator[tuple[Answer, Answer]]:
        asked = operator.attrgetter("stream", "window", "question")
        return zip(*(sorted(each.answers, key=asked) for each in (reference, self)), strict=True)


def _logit(answer: Answer) -> float:
    clipped = min(max(answer.score, 1e-9), 1 - 1e-9)
    return math.log(clipped / (1 - clipped))


def run(args: argparse.Namespace) -> BenchResult:
    """Measure every clip. Figures: ``speedup_<clip>``; of the worst clip, ``decision_overhead`` (decision time over a
    full window's latency) and ``end_latency_share`` (latency of windows computed ahead over that of windows computed
    at their end)."""
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    engine = NativeEngine(model)
    parameters = sum(p.numel() for p in model.model.parameters())
    policies = args.policies or [name for name in refresh_policies.names() if name != NATURAL]
    policies = [NATURAL, *[name for name in policies if name != NATURAL]]
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    overheads: list[float] = []
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for name, path in clip_names(args.clips or made_clips(Path(directory))):
            at_least = args.window + (6 if args.windows is None else args.windows) * args.stride
            clip = read_clip(
                path,
                model.geometry,
                fps=args.fps,
                at_least=at_least,
                at_most=None if args.windows is None else at_least,
            )
            full, measured, decision_s = _measure(engine, clip, args, policies)
            exact = measured.get("all")
            rows += [_row(path, policy, full, exact, result) for policy, result in [("full", full), *measured.items()]]
            at_end_s = measured[NATURAL].latency_s
            shares.append(measured[AHEAD].latency_s / at_end_s)
            figures[f"speedup_{name}"] = full.latency_s / at_end_s
            overheads.append(decision_s / full.latency_s)
    figures["decision_overhead"] = max(overheads)
    figures["end_latency_share"] = max(shares)
    notes = [
        f"model {args.model}: {parameters / 1e6:.1f}M parameters, random weights: {model.random_weights}",
        f"window {args.window:g} s, stride {args.stride:g} s, {args.fps:g} FPS, pruner {args.pruner}; "
        "policies other than anchors get the token budget that anchors used",
    ]
    return BenchResult(figures, rows, notes)


def _measure(
    engine: NativeEngine, clip: ClipFrames, args: argparse.Namespace, policies: Sequence[str]
) -> tuple[Measured, dict[str, Measured], float]:
    """Full, every policy, and the decision seconds per stride: change grid, masks and plan."""
    # Nothing is computed ahead for a patient camera.
    spec = StreamSpec("ours", (QUESTION,), args.window, args.stride, refresh=NATURAL, static_gate=False, patient=True)
    live = replace(spec, stream="live", patient=False)
    whole = prune_clip(clip, "full", "none").samples
    pruned = prune_clip(clip, "ours", args.pruner)
    kept = pruned.samples
    full, ours, ahead = Measured(), Measured(), Measured()
    runs = zip(_answer(engine, spec, kept, ours), _answer(engine, live, kept, ahead), strict=True)
    for request, _ in runs:
        answers, cost = answer_in_full(engine, spec, whole, request)
        full.add(engine, cost.seconds, answers)
        print_progress(
            f"{clip.path.name}: window {request.window}: full {full.seconds[-1]:.2f} s, "
            f"ours {ours.seconds[-1]:.2f} s, {ahead.seconds[-1]:.2f} s with work ahead"
        )
    budget = _budget(ours.answers)
    measured = {NATURAL: ours, AHEAD: ahead}
    for name in policies:
        if name == NATURAL:
            continue
        policy = replace(spec, refresh=name, refresh_budget=None if name in ("all", "none") else budget)
        measured[name] = Measured()
        for _ in _answer(engine, policy, kept, measured[name]):
            pass
        print_progress(f"{clip.path.name}: {name}: {measured[name].latency_s:.2f} s a window")
    strides = span_seconds(kept) / args.stride
    decision_s = (clip.change_s + pruned.mask_s) / strides + ours.mean(lambda window: window.timing.plan_s)
    return full, measured, decision_s


def _budget(answers: Sequence[Answer]) -> float:
    """Share of the overlap that the natural policy refreshed, from the first window on in which it refreshed any. KV
    that is still exact, because none of its context has left the window, needs no refresh under any policy."""
    refreshing = [each.tokens for each in itertools.dropwhile(lambda each: not each.tokens.refreshed, answers)]
    overlap = sum(tokens.reused + tokens.refreshed for tokens in refreshing)
    return sum(tokens.refreshed for tokens in refreshing) / overlap if overlap else 0.0


def _answer(
    engine: NativeEngine, spec: StreamSpec, samples: Sequence[FrameSample], measured: Measured
) -> Iterator[WindowRequest]:
    """Answer every window of a stream; measures and yields those after the first."""
    engine.evict(spec.stream)
    engine.admit(spec)
    for sample in samples:
        for request in engine.push(replace(sample, stream=spec.stream)):
            began = time.perf_counter()
            answers = engine.step([request])
            if request.end - samples[0].pts > spec.window_s * MICROSECONDS:
                measured.add(engine, time.perf_counter() - began, answers)
                yield request
        while not spec.patient and engine.prefill_ahead():
            pass
    engine.evict(spec.stream)


def _row(clip: Path, name: str, full: Measured, exact: Measured | None, result: Measured) -> dict[str, Any]:
    """``logit_diff``: |logit P(yes) - full's|, the error of pruning and reuse together; ``refresh_diff``: the same
    against ``all`` on the same pruned windows, the error of reuse alone."""
    return {
        "clip": clip.stem,
        "policy": name,
        **result.columns(),
        "computed": round(result.mean(lambda window: window.tokens.computed)),
        "speedup": round(full.latency_s / result.latency_s, 2),
        "flops_ratio": round(full.gflops / result.gflops, 2),
        "logit_diff": round(result.logit_diff(full), 4),
        "refresh_diff": None if exact is None or result is full else round(result.logit_diff(exact), 4),
        "agreement": round(result.agreement(full), 3),
    }
