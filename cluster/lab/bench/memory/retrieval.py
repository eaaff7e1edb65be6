"""Clusters against single tokens: time to the first token and blocks fetched, where both find as much of what matters.

The same frames lie in a node of another process, once token by token (as InfiniGen-P retrieves) and once in clusters of
each kind. The same questions are asked of all. Recall is the share of a query row's true top keys, found by going
through all of them, that were among what was read. The share that clusters may read grows until they find what tokens
do. A transfer is one block that was fetched for a question: one cluster of one layer and head, be it one token.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cluster.engine.native.engine import NativeEngine
from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import CAMERA, QUESTIONS, Footage, ListeningBank, Watched
from cluster.lab.bench.node import far_tier
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.types import AskSpec, MemorySpec

TOKENS_SHARE = 0.1
"""Of all tokens, what the token retriever reads."""
CLUSTER_SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CLUSTERED = ("mosaic", "resv")
TOP = 16
"""True top keys of a query row."""

_ROOM = 2**30
# Host memory above the node: too small to hold what a question reads, as for a camera that is seldom asked about.
_HOST, _SLAB = 256 * 2**10, 64 * 2**10


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over questions; ``ttft_s`` the median of all, ``share`` the retriever's setting."""

    organiser: str
    share: float
    recall: float
    read: float
    transfers: float
    ttft_s: float


def measure(footage: Footage) -> Part:
    """Figures ``ttft_vs_token_retrieval``, ``transfers_vs_token_retrieval``: on the clip where they are
    smaller; of each organiser, and without its name of the one that begins to answer soonest."""
    args = footage.args
    model = footage.model(args.model)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in CLUSTERED}
    for watched in footage.watched(args.model):
        tokens = measure_organiser(model, watched, "tokens", (TOKENS_SHARE,), 0.0, args.repeats)
        rows.append(_row(watched, tokens, tokens))
        for name in CLUSTERED:
            found = measure_organiser(model, watched, name, CLUSTER_SHARES, tokens.recall, args.repeats)
            rows.append(_row(watched, found, tokens))
            ratios[name].append((tokens.ttft_s / found.ttft_s, tokens.transfers / found.transfers))
            print(f"retrieval: {watched.clip}, {name}", file=sys.stderr)
    worst = {name: tuple(map(min, zip(*pairs, strict=True))) for name, pairs in ratios.items()}
    best = max(worst, key=lambda name: worst[name])
    notes = [
        f"figures without a name are those of {best}; top {TOP} keys of each query row; tokens read "
        f"{TOKENS_SHARE:g} of all, clusters as much as it takes to find as many top keys; a transfer is a block of one "
        "layer and head that was fetched"
    ]
    figures = {"ttft_vs_token_retrieval": worst[best][0], "transfers_vs_token_retrieval": worst[best][1]}
    for name, (ttft, transfers) in worst.items():
        figures |= {f"ttft_vs_token_retrieval_{name}": ttft, f"transfers_vs_token_retrieval_{name}": transfers}
    return Part(figures, rows, notes)


def measure_organiser(
    model: VisionLanguageModel, watched: Watched, organiser: str, shares: Sequence[float], recall: float, repeats: int
) -> Outcome:
    """Ask all questions about what left a clip's windows; the first share that finds ``recall``, or the last."""
    with far_tier(_ROOM) as node:
        bank = ListeningBank(TierStack([Arena(_HOST, slab_bytes=_SLAB), node]))
        engine = NativeEngine(model, memories=bank)
        spec = MemorySpec(compressor="none", organiser=organiser, retriever="top_k", cap_bytes=_ROOM)
        bank.open_stream(CAMERA, spec)
        for chunk in watched.chunks:
            bank.accept_chunk(chunk)
        bank.get_memory(CAMERA)[0].settle()
        keys = torch.cat([chunk.key.float() for chunk in watched.chunks], dim=2)
        share = found = 0.0
        for share in shares:
            bank.open_stream(CAMERA, replace(spec, retriever_options={"share": share}))
            found = statistics.fmean(_recall(engine, bank, text, keys) for text in QUESTIONS)
            if found >= recall:
                break
        asked = [_ask(engine, text) for _ in range(repeats) for text in QUESTIONS]
        return Outcome(
            organiser,
            share,
            found,
            statistics.fmean(read for read, _, _ in asked),
            statistics.fmean(blocks for _, blocks, _ in asked),
            statistics.median(seconds for _, _, seconds in asked),
        )


def _recall(engine: NativeEngine, bank: ListeningBank, text: str, keys: torch.Tensor) -> float:
    """Mean over layers, heads and query rows; ``keys [L, H, n, D]`` of all tokens."""
    memory, _ = bank.get_memory(CAMERA)
    bank.listen = True
    engine.ask(AskSpec(CAMERA, text, max_new_tokens=1)).step()
    bank.listen = False
    assert bank.heard is not None
    found = []
    for layer in range(keys.shape[0]):
        for head in range(keys.shape[1]):
            query, read = bank.heard.of(memory, layer, head)
            best = (query @ keys[layer, head].mT).topk(min(TOP, keys.shape[2]), dim=1).indices
            found.append(float(read[best].float().mean()))
    return statistics.fmean(found)


def _ask(engine: NativeEngine, text: str) -> tuple[float, int, float]:
    """(share of the tokens that was read, blocks fetched, seconds to the first token)."""
    run = engine.ask(AskSpec(CAMERA, text, max_new_tokens=1))
    while run.step() is not None:
        pass
    stats = run.retrieval.stats
    return stats.fetched_share, stats.clusters, run.result.first_token_s


def _row(watched: Watched, found: Outcome, tokens: Outcome) -> dict[str, Any]:
    return {
        "clip": watched.clip,
        "organiser": found.organiser,
        "tokens": watched.tokens,
        "share": found.share,
        "recall": found.recall,
        "read": found.read,
        "transfers": found.transfers,
        "ttft_ms": found.ttft_s * 1000,
        "ttft_ratio": tokens.ttft_s / found.ttft_s,
        "transfers_ratio": tokens.transfers / found.transfers,
    }
