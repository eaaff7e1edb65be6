"""Compares engines on the same clips, weights and windows in one run.

*Full* computes every token of every window and encodes each frame once. *Pruned* computes the kept tokens of every
window. *Ours* reuses the last window's KV and refreshes part of it. All streams of a batch close a window together; the
engines answer it in turn, each in one step. Latency is from the last frame in to the answers: no engine encodes a part
of a stride before its last frame arrives.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.engine.base import Engine
from cluster.engine.native.engine import NativeEngine
from cluster.lab.bench.frames import add_clip_arguments, clip_names, made_clips, prune_clip, read_clip
from cluster.lab.bench.harness import BenchResult, positive, print_progress
from cluster.lab.bench.window import QUESTION, Measured
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.types import MICROSECONDS, FrameSample, PatchGeometry, StreamSpec, WindowRequest

REFERENCE = "native_full"

TIMEOUT_S = 1800.0
"""Time limit of a vLLM batch in seconds: whole windows of a large model take minutes on a CPU."""


# -- contestants -----------------------------------------------------------------------------------
@contextmanager
def start_vllm(model: VisionLanguageModel, **arguments: Any) -> Iterator[Engine]:
    """Run a vLLM engine with these engine arguments."""
    from cluster.engine.vllm.engine import VllmEngine
    from cluster.engine.vllm.settings import VllmSettings

    engine = VllmEngine(model, settings=VllmSettings(arguments, timeout_s=TIMEOUT_S))
    try:
        yield engine
    finally:
        engine.close()


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to answer the windows.

    * ``whole``: receives every patch of every frame, else the pruner's kept patches
    * ``refresh``: refresh policy of its streams
    * ``prefix_cache``: whether vLLM's prefix cache is on; None: the native engine
    """

    what: str
    whole: bool
    refresh: str = "all"
    prefix_cache: bool | None = None

    def start(self, model: VisionLanguageModel) -> AbstractContextManager[Engine]:
        if self.prefix_cache is None:
            return nullcontext(NativeEngine(model))
        return start_vllm(model, enable_prefix_caching=self.prefix_cache)


CONTESTANTS: dict[str, Contestant] = {
    "native_full": Contestant("every token of every window; each frame is encoded once", whole=True),
    "native": Contestant("pruned, with KV reuse and refresh by policy", whole=False, refresh="anchors"),
    "native_none": Contestant("native without refresh", whole=False, refresh="none"),
    "vllm_full": Contestant(
        "vLLM, every token; each frame is encoded once, by our tower, and its embeddings are cached; prefix cache on",
        whole=True,
        prefix_cache=True,
    ),
    "vllm_full_uncached": Contestant("vllm_full with the prefix cache off", whole=True, prefix_cache=False),
    "vllm_pruned": Contestant("vLLM, kept tokens only", whole=False, prefix_cache=True),
}


# -- the bench -------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    add_clip_arguments(parser, model="bench-qwen2_5_vl", window=40.0, stride=8.0)
    parser.add_argument("--windows", type=positive, default=3, metavar="N", help="measured windows")
    parser.add_argument(
        "--only", nargs="+", choices=list(CONTESTANTS), metavar="NAME", help=f"from: {', '.join(CONTESTANTS)}"
    )


def run(args: argparse.Namespace) -> BenchResult:
    """Measure all contestants on all clips together, one stream per clip."""
    chosen = {name: CONTESTANTS[name] for name in args.only or CONTESTANTS}
    if any(contestant.prefix_cache is not None for contestant in chosen.values()):
        from cluster.engine.vllm.settings import check_version

        # Fail before minutes are spent.
        check_version()
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        clips = args.clips or made_clips(Path(directory))
        whole, pruned = _samples(clips, model.geometry, args)
        entrants = {
            name: Entrant(each, running.enter_context(each.start(model)), whole if each.whole else pruned)
            for name, each in chosen.items()
        }
        spec = StreamSpec("", (QUESTION,), args.window, args.stride, static_gate=False)
        run_interleaved(entrants, spec, print_progress)
    measured = {name: entrant.measured for name, entrant in entrants.items()}
    rows = [_row(name, each, measured.get(REFERENCE)) for name, each in measured.items()]
    parameters = sum(p.numel() for p in model.model.parameters())
    notes = [
        f"model {args.model}: {parameters / 1e6:.1f}M parameters, random weights: {model.random_weights}",
        f"{len(clips)} streams in a batch: {', '.join(path.stem for path in clips)}; "
        f"window {args.window:g} s, stride {args.stride:g} s, {args.fps:g} FPS, pruner {args.pruner}",
        *(f"{name}: {contestant.what}" for name, contestant in chosen.items()),
    ]
    return BenchResult(figures_of(measured), rows, notes)


def _samples(
    clips: Sequence[Path], geometry: PatchGeometry, args: argparse.Namespace
) -> tuple[list[list[FrameSample]], list[list[FrameSample]]]:
    """Samples that a decoder would send for each clip: with every patch, and pruned."""
    seconds = args.window + args.windows * args.stride
    whole: list[list[FrameSample]] = []
    pruned: list[list[FrameSample]] = []
    for name, path in clip_names(list(clips)):
        clip = read_clip(path, geometry, fps=args.fps, at_least=seconds, at_most=seconds)
        whole.append(prune_clip(clip, name, "none").samples)
        pruned.append(prune_clip(clip, name, args.pruner).samples)
    return whole, pruned


FIGURES: dict[str, tuple[str, str]] = {
    # Latency of the first over latency of the second.
    "native_over_vllm_full": ("vllm_full", "native"),
    "vllm_pruned_over_vllm_full": ("vllm_full", "vllm_pruned"),
    # Equal work on both sides: only frame embeddings are cached.
    "native_full_vs_vllm_full": ("vllm_full_uncached", "native_full"),
}


# -- interleaved windows, so that a machine that slows down slows all engines ----------------------
@dataclass(slots=True)
class Steps(Measured):
    """Measured steps, each of one window per stream. ``queries``, ``hits``: tokens looked up and found in vLLM's prefix
    cache."""

    queries: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens found in the prefix cache."""
        return self.hits / self.queries if self.queries else None


@dataclass(slots=True)
class Entrant:
    """A running contestant: its engine, input (``samples[i]`` of stream ``i``) and results."""

    contestant: Contestant
    engine: Engine
    samples: Sequence[Sequence[FrameSample]]
    measured: Steps = field(default_factory=Steps)
    waiting: list[WindowRequest] = field(default_factory=list)

    def pop_batch(self) -> list[WindowRequest]:
        """Remove and return the oldest waiting window of each stream."""
        batch: dict[str, WindowRequest] = {}
        for request in self.waiting:
            batch.setdefault(request.stream, request)
        self.waiting = [request for request in self.waiting if request is not batch[request.stream]]
        return list(batch.values())

    def step(self, requests: Sequence[WindowRequest], *, counted: bool) -> float:
        """Answer a batch; returns its seconds."""
        queries, hits = self._cached()
        began = time.perf_counter()
        answers = self.engine.step(requests)
        seconds = time.perf_counter() - began
        if counted:
            self.measured.add(self.engine, seconds, answers)
            after = self._cached()
            self.measured.queries += after[0] - queries
            self.measured.hits += after[1] - hits
        return seconds

    def _cached(self) -> tuple[int, int]:
        core = getattr(self.engine, "core", None)
        return (0, 0) if core is None else (core.stats.queries, core.stats.hits)


def run_interleaved(entrants: Mapping[str, Entrant], spec: StreamSpec, progress: Callable[[str], None]) -> None:
    """Send all frames to all entrants; for every batch of windows, let the entrants answer it in turn.

    The first whole window of each stream warms up caches; those after it are measured.
    """
    streams = len(next(iter(entrants.values())).samples)
    length, stride = (round(seconds * MICROSECONDS) for seconds in (spec.window_s, spec.stride_s))
    for entrant in entrants.values():
        for samples in entrant.samples:
            entrant.engine.admit(replace(spec, stream=samples[0].stream, refresh=entrant.contestant.refresh))
    batches = 0
    for index in range(min(len(samples) for entrant in entrants.values() for samples in entrant.samples)):
        for entrant in entrants.values():
            entrant.waiting += [
                request for samples in entrant.samples for request in entrant.engine.push(samples[index])
            ]
        # Clips with different frame rates may close their windows a frame apart.
        while all(len({request.stream for request in entrant.waiting}) == streams for entrant in entrants.values()):
            batches += 1
            age = batches * stride
            times: list[str] = []
            for name, entrant in entrants.items():
                batch = entrant.pop_batch()
                # Windows before the first whole one are only answered where later ones depend on them.
                if entrant.contestant.refresh != "all" or age + stride > length:
                    times.append(f"{name} {entrant.step(batch, counted=age > length):.2f}")
            progress(f"window {batches} of {streams} streams, seconds: {', '.join(times) or '-'}")


def figures_of(measured: Mapping[str, Steps]) -> dict[str, float]:
    """Latency ratios between contestants that ran, and vLLM's prefix cache hit rate on sliding full windows. Batches
    are equal, so that latency ratios are throughput ratios."""
    figures = {
        figure: measured[slow].latency_s / measured[fast].latency_s
        for figure, (slow, fast) in FIGURES.items()
        if slow in measured and fast in measured
    }
    hit_rate = measured["vllm_full"].hit_rate if "vllm_full" in measured else None
    if hit_rate is not None:
        figures["prefix_cache_hit_rate_sliding"] = hit_rate
    return figures


def _row(name: str, measured: Steps, reference: Steps | None) -> dict[str, Any]:
    """``logit_diff``: |logit P(yes) - the reference's|."""
    return {
        "engine": name,
        **measured.columns(),
        "prefix_hits": None if measured.hit_rate is None else round(measured.hit_rate, 4),
        "windows_per_s": round(1 / measured.window_s, 3),
        "logit_diff": None if reference is None else round(measured.logit_diff(reference), 4),
        "agreement": None if reference is None else round(measured.agreement(reference), 3),
    }
