"""Engines side by side: same clips, same weights, same windows, one run.

*Full* computes every token of every window and encodes each frame once. *Pruned* computes the kept tokens of every
window. *Ours* keeps the KV of the last window and refreshes a part of it. All streams of a batch close a window
together; each engine answers the batch in one step, one engine after the other. Latency is last frame in -> answers:
nothing of a stride is encoded before its last frame has come, in any engine.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.engine.base import Engine
from cluster.engine.native.engine import NativeEngine
from cluster.lab.bench.frames import add_clip_arguments, clip_names, made_clips, prune_clip, read_clip
from cluster.lab.bench.harness import BenchResult, positive, print_progress
from cluster.lab.bench.window import QUESTION, Measured
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS, FrameSample, PatchGeometry, StreamSpec, WindowRequest

REFERENCE = "native_full"

TIMEOUT_S = 1800.0
"""Seconds that vLLM may take for a batch: whole windows of a large model on a processor take minutes."""


# -- who is compared -------------------------------------------------------------------------------
@contextmanager
def _native(model: VisionLanguageModel) -> Iterator[Engine]:
    yield NativeEngine(model)


@contextmanager
def start_vllm(model: VisionLanguageModel, **arguments: Any) -> Iterator[Engine]:
    """A vLLM engine with these engine arguments."""
    from cluster.engine.vllm.engine import VllmEngine
    from cluster.engine.vllm.settings import VllmSettings

    engine = VllmEngine(model, settings=VllmSettings(arguments, timeout_s=TIMEOUT_S))
    try:
        yield engine
    finally:
        engine.close()


_vllm = partial(start_vllm, enable_prefix_caching=True)


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to answer the windows.

    * ``whole``: it is given every patch of every frame; else what the pruner keeps
    * ``refresh``: the policy of its streams
    * ``vllm``: it needs vLLM, which this environment may lack
    * ``goes_on``: a window costs it less for the windows before, so it answers every one of them; else it is spared
      those before the first whole one
    """

    name: str
    what: str
    start: Callable[[VisionLanguageModel], AbstractContextManager[Engine]]
    whole: bool
    refresh: str
    vllm: bool = False
    goes_on: bool = False


def check(contestants: Iterable[Contestant]) -> None:
    """Refuse what this environment cannot run, before minutes are spent.

    Raises:
        ConfigError: vLLM is needed and not there, or of a version that is not tested.
    """
    if any(contestant.vllm for contestant in contestants):
        from cluster.engine.vllm.settings import check_version

        check_version()


CONTESTANTS: dict[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Contestant("native_full", "every token of every window; a frame is encoded once", _native, True, "all"),
        Contestant("native", "pruned, reused, refreshed by policy", _native, False, "anchors", goes_on=True),
        Contestant("native_none", "the same with nothing refreshed", _native, False, "none", goes_on=True),
        Contestant(
            "vllm_full",
            "vLLM, every token; each frame is encoded once, by our tower, and its embeddings are kept; prefix cache on",
            _vllm,
            True,
            "all",
            vllm=True,
        ),
        Contestant(
            "vllm_full_uncached",
            "vllm_full with the prefix cache off",
            partial(_vllm, enable_prefix_caching=False),
            True,
            "all",
            vllm=True,
        ),
        Contestant("vllm_pruned", "vLLM, kept tokens alone", _vllm, False, "all", vllm=True),
    )
}


# -- the bench -------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the harness."""
    add_clip_arguments(parser, model="bench-qwen2_5_vl", window=40.0, stride=8.0)
    parser.add_argument("--windows", type=positive, default=3, metavar="N", help="windows counted")
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
    rows = [_row(name, each, measured.get(REFERENCE)) for name, each in measured.items()]
    parameters = sum(p.numel() for p in model.model.parameters())
    notes = [
        f"model {args.model}: {parameters / 1e6:.1f}M parameters, random weights: {model.random_weights}",
        f"{len(clips)} streams in a batch: {', '.join(path.stem for path in clips)}; "
        f"window {args.window:g} s, stride {args.stride:g} s, {args.fps:g} FPS, pruner {args.pruner}",
        *(f"{contestant.name}: {contestant.what}" for contestant in chosen),
    ]
    return BenchResult(figures_of(measured), rows, notes)


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


# -- windows in turns, so that a machine that slows down slows all engines -------------------------
@dataclass(slots=True)
class Steps(Measured):
    """A step answers one window of each stream. ``queries``, ``hits``: tokens that vLLM's prefix cache was asked for
    and had."""

    queries: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that the prefix cache had."""
        return self.hits / self.queries if self.queries else None

    @property
    def windows_per_s(self) -> float:
        return len(self.windows) / sum(self.seconds)


@dataclass(slots=True)
class Entrant:
    """A contestant on its way: its engine, what it is sent (``samples[i]`` of stream ``i``), and its results."""

    contestant: Contestant
    engine: Engine
    samples: Sequence[Sequence[FrameSample]]
    measured: Steps = field(default_factory=Steps)
    waiting: list[WindowRequest] = field(default_factory=list)

    def admit(self, spec: StreamSpec) -> None:
        """Take all streams in."""
        for samples in self.samples:
            self.engine.admit(replace(spec, stream=samples[0].stream, refresh=self.contestant.refresh))

    def push(self, index: int) -> None:
        """Give every stream its frame."""
        for samples in self.samples:
            self.waiting += self.engine.push(samples[index])

    def pop_batch(self) -> list[WindowRequest]:
        """The oldest window of each stream."""
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
        stats = getattr(self.engine, "vllm_stats", None)
        return (0, 0) if stats is None else (stats.queries, stats.hits)


def run_interleaved(entrants: Sequence[Entrant], spec: StreamSpec, progress: Callable[[str], None]) -> None:
    """Send all frames to all entrants and let each answer every batch of windows, one entrant after the other.

    The first whole window of each stream warms up: caches hold then what they hold later. Those after it are counted.
    """
    streams = len(entrants[0].samples)
    length = round(spec.window_s * MICROSECONDS)
    stride = round(spec.stride_s * MICROSECONDS)
    for entrant in entrants:
        entrant.admit(spec)
    batches = 0
    for index in range(min(len(samples) for entrant in entrants for samples in entrant.samples)):
        for entrant in entrants:
            entrant.push(index)
        # Clips of other frame rates close their windows a frame apart.
        while all(len({request.stream for request in entrant.waiting}) == streams for entrant in entrants):
            batches += 1
            age = batches * stride
            times: list[str] = []
            for entrant in entrants:
                batch = entrant.pop_batch()
                if entrant.contestant.goes_on or age + stride > length:
                    times.append(f"{entrant.contestant.name} {entrant.step(batch, counted=age > length):.2f}")
            progress(f"window {batches} of {streams} streams, seconds: {', '.join(times) or '-'}")


def figures_of(measured: Mapping[str, Steps]) -> dict[str, float]:
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


def _row(name: str, measured: Steps, reference: Steps | None) -> dict[str, Any]:
    """``logit_diff``: |logit P(yes) - the reference's|; ``gflops``: tower and language model."""
    return {
        "engine": name,
        "windows": len(measured.windows),
        "full": round(measured.mean(lambda w: w.tokens.full)),
        "kept": round(measured.mean(lambda w: w.tokens.kept)),
        "computed": round(measured.mean(lambda w: w.computed)),
        "encoded": round(measured.mean(lambda w: w.tokens.encoded)),
        "gflops": round(measured.gflops, 1),
        "vision_s": round(measured.mean(lambda w: w.timing.vision_s), 3),
        "llm_s": round(measured.mean(lambda w: w.timing.llm_s), 3),
        "latency_s": round(measured.latency_s, 3),
        "prefix_hits": None if measured.hit_rate is None else round(measured.hit_rate, 4),
        "windows_per_s": round(measured.windows_per_s, 3),
        "logit_diff": None if reference is None else round(measured.logit_diff(reference), 4),
        "agreement": None if reference is None else round(measured.agreement(reference), 3),
    }
