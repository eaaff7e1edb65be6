"""How much of the time that blocks travel is hidden where a model's own queries predict them."""

from __future__ import annotations

from cluster.lab.bench.memory.delayed import Delayed
from cluster.lab.bench.memory.footage import CAMERA, Watched
from cluster.lab.bench.memory.work import PrefetchRun, Work
from cluster.memory.prefetch import PrefetchStats
from cluster.memory.recollection import Recollection
from cluster.memory.retrieve.top_k import TopK
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.types import MemorySpec

SHARE = 0.1
"""Of all tokens, what a question reads."""

_ROOM = 2**30


def remembered(watched: Watched) -> tuple[StreamMemory, Delayed]:
    """All that left a clip's windows, and the tier it lies in, still without a latency."""
    tier = Delayed(Arena(_ROOM), 0.0)
    memory = StreamMemory(CAMERA, MemorySpec(compressor="none", cap_bytes=_ROOM), TierStack([tier]))
    for chunk in watched.chunks:
        memory.add(chunk)
    memory.settle()
    # Clusters that wait for being loaded are split by then, so that all questions to come find the same ones.
    _questions(watched, memory, None, ahead=True)
    return memory, tier


def measure_asked(
    watched: Watched, memory: StreamMemory, tier: Delayed, latency_s: float, work: Work
) -> tuple[float, PrefetchRun]:
    """Questions about a clip, layer by layer with the queries that the model really had: the query of a layer says what
    the next one will want.

    Args:
        memory: of the clip, in ``tier``.
        latency_s: added to every load.
        work: what each layer does.

    Returns:
        Share of the wanted blocks that were predicted, of layers that have one before them; and the times, summed up
        over all questions.
    """
    tier.seconds = latency_s
    without, first = _questions(watched, memory, work, ahead=False)
    ahead, _ = _questions(watched, memory, work, ahead=True)
    later = ahead.used + ahead.missed - first
    hidden = 1 - ahead.waited_s / without.waited_s
    return ahead.used / later, PrefetchRun(hidden, ahead.waited_s, without.waited_s, (), (), ahead)


def _questions(watched: Watched, memory: StreamMemory, work: Work | None, *, ahead: bool) -> tuple[PrefetchStats, int]:
    """Sums over all questions, and how many blocks their first layers wanted."""
    total, first = PrefetchStats(), 0
    for asked in watched.asked:
        with Recollection(memory, TopK(share=SHARE), prefetch=ahead) as recollection:
            for layer, query in enumerate(asked.queries):
                recollection.fetch(layer, query)
                if layer == 0:
                    first += recollection.stats.clusters
                if work is not None:
                    work()
            recollection.prefetcher.finish()
            stats = recollection.prefetcher.stats
            for name in ("predicted", "used", "wasted", "late", "missed", "waited_s"):
                setattr(total, name, getattr(total, name) + getattr(stats, name))
    return total, first
