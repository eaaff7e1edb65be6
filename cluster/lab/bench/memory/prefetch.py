"""Share of block transfer time hidden by loading a layer's blocks while the layer before computes.

A question runs through its layers on a tier with a given load latency, with and without prefetching the next layer's
blocks before a layer computes. The hidden share is one minus the remaining waiting time over that without prefetching.
The first layer cannot be prefetched, so that at most ``1 - 1/n`` can be hidden with ``n`` layers.
"""

from __future__ import annotations

import argparse
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cluster.lab.bench.harness import BenchResult, positive, print_progress
from cluster.lab.bench.memory.footage import CAMERA, Footage, Watched
from cluster.lab.bench.node import DelayedArena
from cluster.lab.report import charts
from cluster.memory.prefetch import FetchEvent, Prefetcher, PrefetchStats
from cluster.memory.retrieval_session import RetrievalSession
from cluster.memory.retrieve import Retriever
from cluster.memory.retrieve.wicsum import WiCSum
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.base import Block, BlockKey, Outcome, Tier
from cluster.memory.tiers.stack import TierStack
from cluster.types import MemorySpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEFORE = 0.1
"""Share of a layer's work done before the next layer's query is predicted; most of the rest is its MLP."""

_CAP = 2**30


def remembered(watched: Watched) -> tuple[StreamMemory, DelayedArena]:
    """A memory of everything that left a clip's windows, and its tier, initially without latency."""
    tier = DelayedArena(_CAP)
    memory = StreamMemory(CAMERA, MemorySpec(compressor="none", cap_bytes=_CAP), TierStack([tier]))
    for chunk in watched.chunks:
        memory.add_chunk(chunk)
    memory.settle()
    # Ask once to run splits deferred until loading, so that all later questions see the same clusters.
    _questions(watched, memory, WiCSum(), None, ahead=True)
    return memory, tier


def measure_asked(
    watched: Watched, memory: StreamMemory, retriever: Retriever, tier: DelayedArena, latency_s: float, work: Work
) -> tuple[float, PrefetchRun]:
    """Run the questions about a clip layer by layer with the model's real queries and predictions, while every load
    takes an extra ``latency_s`` and each layer does ``work``.

    Returns:
        Predicted share of the needed blocks, excluding the first layer; and times summed over all questions.
    """
    tier.seconds = latency_s
    without, first = _questions(watched, memory, retriever, work, ahead=False)
    ahead, _ = _questions(watched, memory, retriever, work, ahead=True)
    later = ahead.used + ahead.missed - first
    return ahead.used / later, PrefetchRun(without.waited_s, ahead)


def _questions(
    watched: Watched, memory: StreamMemory, retriever: Retriever, work: Work | None, *, ahead: bool
) -> tuple[PrefetchStats, int]:
    """Sums over all questions, and the number of blocks needed by their first layers."""
    total, first = PrefetchStats(), 0
    for asked in watched.asked:
        with RetrievalSession(memory, retriever, prefetch=ahead) as retrieval:
            for layer, query in enumerate(asked.queries):
                retrieval.fetch(layer, query)
                if layer == 0:
                    first += retrieval.stats.clusters
                if work is not None:
                    work(BEFORE)
                if layer < len(asked.predicted):
                    retrieval.prefetch(layer + 1, asked.predicted[layer])
                if work is not None:
                    work(1 - BEFORE)
            retrieval.prefetcher.discard_predictions()
            stats = retrieval.prefetcher.stats
            for name in ("predicted", "used", "wasted", "late", "missed", "waited_s"):
                setattr(total, name, getattr(total, name) + getattr(stats, name))
    return total, first


@dataclass(frozen=True, slots=True)
class Compute:
    """One layer's work, in ``time.perf_counter`` seconds."""

    layer: int
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class PrefetchRun:
    """``transfer_s``: waiting time without prefetching; ``stats``, ``events``, ``computes``: of the run with it."""

    transfer_s: float
    stats: PrefetchStats
    events: Sequence[FetchEvent] = ()
    computes: Sequence[Compute] = ()

    @property
    def hidden(self) -> float:
        """Hidden share of ``transfer_s``."""
        return 1 - self.stats.waited_s / self.transfer_s


class Work:
    """Stand-in for a layer: matrix products for at least ``seconds``, each taking about a quarter of that or less, like
    the handful of products in a layer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        for size in (64, 128, 256, 512, 1024):
            matrix = torch.randn(size, size) / size**0.5
            took = []
            for _ in range(3):
                began = time.perf_counter()
                torch.mm(matrix, matrix)
                took.append(time.perf_counter() - began)
            if size == 64 or min(took) <= seconds / 4:
                self._matrix = matrix

    def __call__(self, share: float = 1.0) -> None:
        until = time.perf_counter() + share * self._seconds
        product = self._matrix
        while time.perf_counter() < until:
            product = product @ self._matrix


LATENCIES_MS = (1, 5, 20)
ACCURACIES = (1.0, 0.95, 0.8)
COMPUTE_SHARE = 1.25
"""A layer's compute time relative to its blocks' transfer time."""

_TOKENS, _WIDTH = 32, 128
_ROW = 18


def measure_prefetch(
    latency_s: float, *, layers: int = 28, compute_s: float, blocks_per_layer: int = 16, accuracy: float = 1.0
) -> PrefetchRun:
    """Time one question with and without prediction, on blocks of 32 tokens of 128 channels in host memory.

    Args:
        latency_s: added to every load.
        compute_s: minimum seconds of matrix products per layer.
        accuracy: share of a layer's blocks that are predicted; a wrong block is predicted for every other.

    Raises:
        ValueError: a needed block was not loaded.
    """
    held = [[BlockKey("bench", layer, 0, number) for number in range(2 * blocks_per_layer)] for layer in range(layers)]
    block = Block(
        *torch.randn(2, _TOKENS, _WIDTH, dtype=torch.float32).to(torch.bfloat16), *torch.zeros(2, _TOKENS).int()
    )
    tier = DelayedArena(2 * layers * len(held[0]) * block.nbytes + 8 * 2**20)
    tier.seconds = latency_s
    for keys in held:
        tier.store([(key, block) for key in keys])
    wanted = [keys[:blocks_per_layer] for keys in held]
    predicted = []
    for layer, keys in enumerate(held):
        # Spread errors evenly over the layers.
        wrong = blocks_per_layer * (1 - accuracy)
        wrong_here = int((layer + 1) * wrong + 1e-9) - int(layer * wrong + 1e-9)
        predicted.append(keys[wrong_here : blocks_per_layer + wrong_here])
    work = Work(compute_s)
    _question(tier, wanted[:2], None, work)
    without, *_ = _question(tier, wanted, None, work)
    ahead = _question(tier, wanted, predicted, work)
    tier.close()
    return PrefetchRun(without.waited_s, *ahead)


def _question(
    tier: Tier, wanted: Sequence[Sequence[BlockKey]], predicted: Sequence[Sequence[BlockKey]] | None, work: Work
) -> tuple[PrefetchStats, list[FetchEvent], list[Compute]]:
    events: list[FetchEvent] = []
    computes: list[Compute] = []
    with Prefetcher(tier.load, deadline_s=60.0, on_event=events.append) as fetcher:
        for layer, keys in enumerate(wanted):
            if any(one.outcome is not Outcome.HIT for one in fetcher.fetch(keys)):
                raise ValueError(f"a block of layer {layer} was not loaded")
            if predicted is not None and layer + 1 < len(wanted):
                fetcher.prefetch(predicted[layer + 1])
            began = time.perf_counter()
            work()
            computes.append(Compute(layer, began, time.perf_counter()))
    return fetcher.stats, events, computes


def timeline(events: Sequence[FetchEvent], computes: Sequence[Compute]) -> Figure:
    """Chart with one row per layer over time: loads of its blocks, and its computation. Raises ``ValueError`` if there
    is nothing to draw."""
    drawn: list[FetchEvent | Compute] = [*events, *computes]
    if not drawn:
        raise ValueError("a timeline needs at least one load or one layer's work")
    first = min(one.began_s for one in drawn)
    layers = sorted({one.layer for one in drawn})
    figure = charts.new_figure("Loads and work, layer by layer", charts.WIDTH, 100 + _ROW * len(layers))
    (axes,) = figure.axes
    for one in drawn:
        began_ms, took_ms = (one.began_s - first) * 1000, (one.ended_s - one.began_s) * 1000
        if isinstance(one, Compute):
            name, place, text = "computes", 0, f"layer {one.layer} computes for {took_ms:.2f} ms"
        else:
            name, place = ("prefetched", 3) if one.predicted else ("loaded on demand", 1)
            text = f"{one.blocks} blocks ({one.bytes} bytes) of layer {one.layer} {name} in {took_ms:.2f} ms"
        # Loads are above, work below the middle of the row.
        row = layers.index(one.layer) + (0.2 if place == 0 else -0.2)
        (bar,) = axes.barh(row, took_ms, 0.36, began_ms, color=charts.SERIES_COLORS[place])
        bar.set_label(name)
        charts.set_tooltips(bar, text)
    axes.set_title("Loads and work, layer by layer", loc="left", fontsize=13, color=charts.COLOR["ink"])
    axes.set(xlabel="milliseconds", ylabel="layer", ylim=(len(layers) - 0.4, -0.6), xlim=(0, None))
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.grid(axis="x", color=charts.COLOR["rule"])
    charts.add_legend(figure, 3)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of part prefetch to the parser."""
    parser.add_argument("--layers", type=positive, default=28, metavar="N", help="layers in part prefetch")
    parser.add_argument("--blocks", type=positive, default=16, metavar="N", help="blocks per layer in part prefetch")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="repetitions, for medians")


def measure(footage: Footage) -> BenchResult:
    """Figures: ``prefetch_hidden_<latency>ms`` with perfect predictions; ``prediction_recall``, the share of needed
    blocks that a model's own predictions name, the smaller of two models; and ``prefetch_hidden_real`` with those of
    the deeper model, the smallest over the latencies. Writes the timeline of the longest latency to ``args.out``."""
    args = footage.args
    rows: list[dict[str, Any]] = []
    figures = {}
    for latency in LATENCIES_MS:
        made = partial(measure_prefetch, latency / 1000, layers=args.layers, blocks_per_layer=args.blocks)
        # Measured transfer time of a layer's blocks: latency, reading, and scheduling delay.
        compute_s = made(compute_s=latency / 1000).transfer_s / args.layers * COMPUTE_SHARE
        for accuracy in ACCURACIES:
            runs = [made(compute_s=compute_s, accuracy=accuracy) for _ in range(args.repeats)]
            done = sorted(runs, key=operator.attrgetter("hidden"))[len(runs) // 2]
            if accuracy == 1:
                figures[f"prefetch_hidden_{latency}ms"] = done.hidden
                if args.out is not None:
                    (args.out / "prefetch.svg").write_text(charts.svg(timeline(done.events, done.computes)))
            rows.append(_row("synthetic", latency, compute_s, args.layers, accuracy, done))
        print_progress(f"prefetch: {latency} ms")
    recall, hidden = [], []
    models = (args.model, args.bench_model)
    for name in models:
        watched = footage.watched(name)[0]
        layers = len(watched.chunks[0].key)
        memory, tier = remembered(watched)
        for latency in LATENCIES_MS:
            # A layer's blocks are fetched in one load.
            compute_s = latency / 1000 * COMPUTE_SHARE
            asked = [
                measure_asked(watched, memory, WiCSum(), tier, latency / 1000, Work(compute_s))
                for _ in range(args.repeats)
            ]
            right, done = sorted(asked, key=lambda one: one[1].hidden)[len(asked) // 2]
            recall.append(right)
            if name == args.bench_model:
                hidden.append(done.hidden)
            rows.append(_row(name, latency, compute_s, layers, right, done))
        tier.close()
        print_progress(f"prefetch: {name} on {watched.clip}")
    figures |= {"prediction_recall": min(recall), "prefetch_hidden_real": min(hidden)}
    random = ", ".join(f"{name}: random weights {footage.model(name).random_weights}" for name in models)
    notes = [
        f"synthetic: {args.layers} layers of {args.blocks} blocks, {_TOKENS} tokens by {_WIDTH} channels in bfloat16",
        f"models: clusters of what left the windows of {watched.clip}, predicted by each layer's query projection of "
        "the previous layer's MLP input; accuracy: predicted share of the needed blocks; " + random,
        "the first layer cannot be predicted: with n layers at most 1 - 1/n (limit) can be hidden",
    ]
    return BenchResult(figures, rows, notes)


def _row(
    queries: str, latency: int, compute_s: float, layers: int, accuracy: float, done: PrefetchRun
) -> dict[str, Any]:
    return {
        "queries": queries,
        "latency_ms": latency,
        "compute_ms": compute_s * 1000,
        "accuracy": accuracy,
        "hidden": done.hidden,
        "limit": 1 - 1 / layers,
        "waited_ms": done.stats.waited_s * 1000,
        "waited_without_ms": done.transfer_s * 1000,
        **{name: getattr(done.stats, name) for name in ("used", "late", "missed", "wasted", "predicted")},
    }
