"""Savings of Mosaic's deferred cluster splits over eager ones, on the same frames and questions.

Clusters are offloaded once written; only those that the last question loaded are resident. Eager splitting fetches a
cluster from wherever it is; deferred splitting waits until a question loads it. A question loads the best clusters up
to a share of all tokens; recall is the share of its true top keys, over all tokens, that these contain.
"""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.memory.footage import Asked, Footage
from cluster.memory.head_memory import KVChunk
from cluster.memory.organise import NewTokens
from cluster.memory.organise.mosaic import Mosaic, VisualPartitions
from cluster.memory.retrieve.nearest import TopK

SHARES = (0.05, 0.1, 0.2)
FIGURE_SHARE = 0.1
SIMILARITY = 0.6
"""Similarity threshold of visual partitions, as in a stream's memory."""


class _HeadRun:
    """Simulates one layer and head and its tiers, with direct access to all tokens. ``fetched``: offloaded clusters
    fetched for a split; ``recalls``, ``shares``: per question."""

    def __init__(self, width: int, share: float, top: int, defer: bool) -> None:
        self.organiser = Mosaic(width, defer=defer)
        self.retriever, self.top = TopK(share=share), top
        self.fetched = 0
        self.recalls: list[float] = []
        self.shares: list[float] = []
        self.key, self.value = torch.zeros(0, width), torch.zeros(0, width)
        self.frame = torch.zeros(0, dtype=torch.int64)
        # Uids of resident clusters.
        self.resident: set[int] = set()

    def add(self, tokens: NewTokens) -> None:
        table = self.organiser.table
        eager = not self.organiser.defer

        def is_resident(clusters: Tensor) -> Tensor:
            return torch.tensor([eager or uid in self.resident for uid in table.uid[clusters].tolist()])

        self.organiser.add(tokens, is_resident)
        self.key, self.value = torch.cat([self.key, tokens.key]), torch.cat([self.value, tokens.value])
        self.frame = torch.cat([self.frame, tokens.frame])
        self._run_pending_splits(None if eager else self.resident)

    def ask(self, query: Tensor) -> None:
        """Load clusters for a question ``[r, D]``, record its recall, then run splits deferred until now."""
        table = self.organiser.table
        chosen = self.retriever.select(query, table)
        loaded = torch.isin(table.of_token, chosen)
        best = (query @ self.key.mT).topk(min(self.top, len(self.key)), dim=1).indices
        self.recalls.append(float(loaded[best].float().mean()))
        self.shares.append(float(loaded.float().mean()))
        self.resident = set(table.uid[chosen].tolist())
        self._run_pending_splits(self.resident)

    def _run_pending_splits(self, within: set[int] | None) -> None:
        """Merge and split pending clusters, of ``within`` or all; parts of resident clusters are resident."""
        table = self.organiser.table
        while waiting := [
            number
            for number in self.organiser.pending.nonzero()[:, 0].tolist()
            if within is None or int(table.uid[number]) in within
        ]:
            # One at a time: merging renumbers later clusters.
            number = waiting[0]
            self.fetched += int(table.uid[number]) not in self.resident
            # New tokens stay resident until merged.
            founded = self.organiser.founded_for(number)
            if len(founded):
                self.organiser.merge(number, founded)
            of = table.members(number)
            new = self.organiser.split(number, self.key[of], self.value[of], self.frame[of])
            if new is not None and within is not None:
                within.add(int(table.uid[new]))


def measure_splits(
    chunks: Sequence[KVChunk],
    asked: Sequence[Asked],
    *,
    block: int = 16,
    share: float = 0.1,
    top: int = 32,
    similarity: float | None = None,
) -> dict[str, float]:
    """Splits and recall of both variants on the KV that left one stream's windows.

    Args:
        chunks: frames in time order.
        asked: questions; those before the first block are ignored.
        block: frames clustered together.
        share: of all tokens that a question loads.
        top: number of keys with the largest products per query row, as ground truth.
        similarity: threshold of visual partitions; None: a single partition.

    Returns:
        ``saving``: share of eager splits that deferring avoids; ``saving_divisions``: the same including divisions of
        new tokens among themselves; for both ``eager`` and ``deferred``: ``splits_``, ``divisions_``, ``fetched_``
        (offloaded clusters fetched for a split), ``founded_``, ``merged_``, ``clusters_``, ``recall_`` and ``loaded_``
        (means over questions, layers and heads); and ``put_off``, the number of deferrals.
    """
    partition = _partitions(chunks, similarity)
    figures: dict[str, float] = {}
    for name, defer in (("eager", False), ("deferred", True)):
        layers, heads, _, width = chunks[0].key.shape
        runs = {place: _HeadRun(width, share, top, defer) for place in itertools.product(range(layers), range(heads))}
        waiting = sorted(asked, key=lambda each: each.frames)
        for first in range(0, len(chunks) - block + 1, block):
            until = first + block
            for (layer, h), run in runs.items():
                run.add(_tokens(chunks[first:until], partition[first:until], layer, h))
            while waiting and waiting[0].frames < until + block:
                now = waiting.pop(0)
                if now.frames < until:
                    continue
                for (layer, h), run in runs.items():
                    run.ask(now.queries[layer][h].float())
        organisers = [run.organiser for run in runs.values()]
        figures |= {
            f"splits_{name}": float(sum(each.splits for each in organisers)),
            f"fetched_{name}": float(sum(run.fetched for run in runs.values())),
            f"founded_{name}": float(sum(each.founded for each in organisers)),
            f"merged_{name}": float(sum(each.merged for each in organisers)),
            f"divisions_{name}": float(sum(each.splits + each.groupings for each in organisers)),
            f"clusters_{name}": float(sum(len(each.table) for each in organisers)),
            f"recall_{name}": _mean([recall for run in runs.values() for recall in run.recalls]),
            f"loaded_{name}": _mean([loaded for run in runs.values() for loaded in run.shares]),
        }
        figures["put_off"] = float(sum(each.deferred for each in organisers))
    for figure, of in (("saving", "splits"), ("saving_divisions", "divisions")):
        eager = figures[f"{of}_eager"]
        figures[figure] = (eager - figures[f"{of}_deferred"]) / max(1.0, eager)
    return figures


def measure(footage: Footage) -> BenchResult:
    """Figure ``deferred_split_saving``: the smallest of the clips when a question loads a tenth of the tokens."""
    rows: list[dict[str, Any]] = []
    savings = []
    for watched in footage.watched(footage.args.model):
        for share in SHARES:
            found = measure_splits(watched.chunks, watched.asked, share=share, similarity=SIMILARITY)
            rows.append({"clip": watched.clip, "share": share, "questions": len(watched.asked), **found})
            if share == FIGURE_SHARE:
                savings.append(found["saving"])
    note = "share: of all tokens that a question loads; queries are from questions asked of the model while it watched"
    return BenchResult({"deferred_split_saving": min(savings)}, rows, [note])


def _partitions(chunks: Sequence[KVChunk], similarity: float | None) -> list[int]:
    if similarity is None:
        return [0] * len(chunks)
    partitions = VisualPartitions(len(chunks[0].mean_embedding), similarity=similarity)
    return [partitions.add(chunk.mean_embedding) for chunk in chunks]


def _tokens(chunks: Sequence[KVChunk], partition: Sequence[int], layer: int, head: int) -> NewTokens:
    tokens = torch.tensor([chunk.tokens for chunk in chunks])
    return NewTokens(
        key=torch.cat([chunk.key[layer, head] for chunk in chunks]).float(),
        value=torch.cat([chunk.value[layer, head] for chunk in chunks]).float(),
        frame=torch.tensor([chunk.index for chunk in chunks]).repeat_interleave(tokens),
        partition=torch.tensor(partition).repeat_interleave(tokens),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
