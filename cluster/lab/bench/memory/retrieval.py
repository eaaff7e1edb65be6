"""Cluster against single-token retrieval: time to first token and blocks fetched at equal recall.

The same frames are stored on a node in another process, once token by token (as InfiniGen-P retrieves) and once in
clusters of each kind, and the same questions are asked of all in turn. Recall is the share of a query row's true top
keys, found by exhaustive search, among the tokens read. The share that clusters may read is raised until their recall
matches that of tokens. A transfer is one block fetched for a question: one cluster (or token) of one layer and head.

ReKV, which reads whole frames, the same for all heads of a layer, is compared with clusters at equal recall over a
history of 64k tokens: a synthetic camera, repeated with slightly different keys. Recall is of the scene's objects
(:mod:`cluster.lab.bench.memory.evidence`), or, for figures with ``_top_keys``, of the questions' true top keys on
clips. ReKV's blocks hold a frame's tokens of all heads, as in its authors' implementation.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import torch

from cluster.engine.native.engine import NativeEngine
from cluster.lab.bench.harness import BenchResult, print_progress
from cluster.lab.bench.memory import evidence
from cluster.lab.bench.memory.footage import (
    CAMERA,
    QUESTIONS,
    Footage,
    ListeningBank,
    Watched,
    run_question,
)
from cluster.lab.bench.node import far_tier
from cluster.lab.evaluation.memory.long_scene import LongScene
from cluster.memory.head_memory import KVChunk
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS, MemorySpec

TOKENS_SHARE = 0.1
"""Share of all tokens that the token retriever reads."""
CLUSTER_SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
REKV_SHARES = (*(part * share for part in (0.002, 0.02, 0.2) for share in CLUSTER_SHARES[:-2]), *CLUSTER_SHARES)
OURS = MemorySpec().organiser
CLUSTERED = ("mosaic", OURS)
REKV_TOKENS = 65_536
"""History in tokens per layer and head for the comparison with ReKV, which reads its 64 frames."""
REKV_SCENE_S = 900.0
"""Seconds of the synthetic camera."""
TOP = 16
"""Number of true top keys per query row."""

_CAP = 2**30
_NOISE = 0.1
# Host memory while storing frames: the default tiers.host_bytes over the 64 cameras of a node.
_HOST_STORING = 2**30 // 64
# While asking: too small for what a question reads, as for a camera that is rarely asked about.
_HOST_ASKING, _SLAB = 256 * 2**10, 64 * 2**10


Setting = tuple[str, dict[str, Any]]
"""A retriever and its options."""


def measure(footage: Footage) -> BenchResult:
    """Figures ``ttft_vs_token_retrieval`` and ``transfers_vs_token_retrieval``, the smallest of the clips, for
    production's organiser and, suffixed, for each; ``ttft_vs_rekv`` and ``ttft_vs_rekv_top_keys``."""
    args = footage.args
    model = footage.model(args.model)
    rows: list[dict[str, Any]] = []
    for watched in footage.watched(args.model):
        rows += _against_tokens(model, watched, args.repeats)
    notes = [
        f"figures without a name are those of {OURS}; top {TOP} keys of each query row; token retrieval reads "
        f"{TOKENS_SHARE:g} of all tokens, clusters as many as it takes to find as many top keys; a transfer is one "
        "fetched block of one layer and head"
    ]
    figures: dict[str, float] = {}
    for name, suffix in ((OURS, ""), *((name, f"_{name}") for name in CLUSTERED)):
        for ratio in ("ttft", "transfers"):
            worst = min(row[f"{ratio}_ratio"] for row in rows if row["organiser"] == name)
            figures[f"{ratio}_vs_token_retrieval{suffix}"] = worst
    # A different scene from part evidence.
    scene = LongScene(REKV_SCENE_S, args.scene_seed + 100, camera=evidence.CAMERA)
    drawn = evidence.watch(model, scene, footage.directory, args.fps)
    long_history = repeat_clip(Watched("drawn", (), [chunk.to(torch.float32) for chunk in drawn.chunks]), REKV_TOKENS)
    rows += _against_rekv(model, long_history, args.repeats, evidence.repeated(drawn, long_history.chunks))
    figures["ttft_vs_rekv"] = rows[-1]["ttft_ratio"]
    faster = []
    for watched in footage.watched(args.model):
        rows += _against_rekv(model, repeat_clip(watched, REKV_TOKENS), args.repeats)
        faster.append(rows[-1]["ttft_ratio"])
    figures["ttft_vs_rekv_top_keys"] = min(faster)
    return BenchResult(figures, rows, notes)


def _against_tokens(model: VisionLanguageModel, watched: Watched, repeats: int) -> list[dict[str, Any]]:
    """Rows of single tokens, and of each kind of clusters at the first share with equal recall, else the last."""
    with ExitStack() as opened:
        tokens, *clustered = (opened.enter_context(remembered(model, watched, name)) for name in ("tokens", *CLUSTERED))
        tokens.choose(_top(TOKENS_SHARE), 0.0, tokens.top_recall)
        for each in clustered:
            each.choose(_top(*CLUSTER_SHARES), tokens.recall, each.top_recall)
        found = _ask_in_turns([tokens, *clustered], repeats)
    print_progress(f"retrieval: {watched.clip}")
    return found


def _ask_in_turns(memories: Sequence[Remembered], repeats: int) -> list[dict[str, Any]]:
    """Ask each question of all memories in turn, so that a machine that slows down slows all; rows with ratios to the
    first."""
    asked = [[each.ask(text) for each in memories] for _ in range(repeats) for text in QUESTIONS]
    found = [each.outcome(some) for each, some in zip(memories, zip(*asked, strict=True), strict=True)]
    first = found[0]
    return [
        row
        | {"ttft_ratio": first["ttft_ms"] / row["ttft_ms"], "transfers_ratio": first["transfers"] / row["transfers"]}
        for row in found
    ]


def _against_rekv(
    model: VisionLanguageModel, watched: Watched, repeats: int, planted: evidence.Watched | None = None
) -> list[dict[str, Any]]:
    """Rows of ReKV, and of clusters with equal recall of the ``planted`` evidence, or else of the questions' true top
    keys."""
    with (
        remembered(model, watched, "frames", JoinedHeads) as frames,
        remembered(model, watched, OURS) as ours,
    ):
        recall = [
            each.top_recall if planted is None else partial(each.evidence_recall, planted) for each in (frames, ours)
        ]
        frames.choose([("rekv", {})], 0.0, recall[0])
        ours.choose(_top(*REKV_SHARES), frames.recall, recall[1])
        found = _ask_in_turns([frames, ours], repeats)
    print_progress(f"retrieval: {watched.clip}, rekv")
    return found


def _top(*shares: float) -> list[Setting]:
    return [("top_k", {"share": share}) for share in shares]


def repeat_clip(watched: Watched, tokens: int) -> Watched:
    """Repeat a clip up to ``tokens`` tokens, each time with different noise of a tenth of the keys' standard
    deviation."""
    rng = torch.Generator().manual_seed(0)
    chunks: list[KVChunk] = []
    span, count = watched.chunks[-1].pts - watched.chunks[0].pts + MICROSECONDS, 0
    for number, chunk in product(range(1 + tokens // watched.tokens), watched.chunks):
        if count >= tokens:
            break
        noise = _NOISE * chunk.key.float().std() * torch.randn(chunk.key.shape, generator=rng)
        chunks.append(replace(chunk, key=chunk.key + noise.to(chunk.key), pts=chunk.pts + number * span))
        count += chunk.tokens
    return replace(watched, chunks=chunks)


Asked = tuple[float, int, float]
"""Share of the tokens read, blocks fetched, seconds to the first token."""


@dataclass(slots=True)
class Remembered:
    """A camera's memory and the engine that asks about it. ``keys``: ``[L, H, n, D]`` of all tokens; ``share``,
    ``recall``: of the chosen setting."""

    clip: str
    engine: NativeEngine
    bank: ListeningBank
    spec: MemorySpec
    keys: torch.Tensor
    share: float = 0.0
    recall: float = 0.0

    def choose(self, settings: Sequence[Setting], recall: float, measure: Callable[[], float]) -> None:
        """Choose the first setting that reaches ``recall``, as given by ``measure``, else the last."""
        for retriever, options in settings:
            self.bank.open_stream(CAMERA, replace(self.spec, retriever=retriever, retriever_options=options))
            self.share, self.recall = options.get("share", 0.0), measure()
            if self.recall >= recall:
                return

    def ask(self, text: str) -> Asked:
        run = run_question(self.engine, text)
        stats = run.retrieval.stats
        return stats.fetched_tokens / max(1, stats.held_tokens), stats.clusters, run.result.first_token_s

    def outcome(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """Means over questions. ``ttft_ms``: median; ``share``: limit on the tokens read."""
        read, blocks, seconds = zip(*asked, strict=True)
        return {
            "clip": self.clip,
            "organiser": self.spec.organiser,
            "tokens": self.keys.shape[2],
            "share": self.share,
            "recall": self.recall,
            "read": statistics.fmean(read),
            "transfers": statistics.fmean(blocks),
            "ttft_ms": statistics.median(seconds) * 1000,
        }

    def evidence_recall(self, planted: evidence.Watched) -> float:
        """Share of passages, layers and heads of which a token is read; see part ``evidence``."""
        memory, retriever = self.bank.get_memory(CAMERA)
        return float(evidence.read_passages(memory, planted, retriever)[0].mean())

    def top_recall(self) -> float:
        """Share of the questions' true top keys that is read; mean over layers, heads and query rows."""
        return statistics.fmean(map(self._top_recall, QUESTIONS))

    def _top_recall(self, text: str) -> float:
        self.bank.listen = True
        run_question(self.engine, text)
        self.bank.listen = False
        assert self.bank.listener is not None
        found = []
        for queries, (_, _, named), keys in zip(
            self.bank.listener.queries(), self.bank.listener.calls, self.keys, strict=True
        ):
            best = (queries @ keys.mT).topk(min(TOP, keys.shape[1]), dim=2).indices
            found += [float(read[rows].float().mean()) for read, rows in zip(named, best, strict=True)]
        return statistics.fmean(found)


class JoinedHeads(RemoteTier):
    """A tier that loads a frame's tokens of all heads in a layer as one block."""

    _joined: Mapping[BlockKey, tuple[BlockKey, int, int | None]] = {}

    def join(self, memory: StreamMemory) -> None:
        """Store every frame of a memory again with the heads of each layer joined."""
        joined: dict[BlockKey, tuple[BlockKey, int, int | None]] = {}
        for layer, heads in enumerate(memory.heads):
            for numbers in zip(*(head.table.block.tolist() for head in heads), strict=True):
                keys = [BlockKey(CAMERA, layer, head, number) for head, number in enumerate(numbers)]
                whole = keys[0]._replace(stream="joined")
                blocks = [one.block for one in super().load(keys) if one.block is not None]
                parts = (torch.cat([getattr(each, part.name) for each in blocks]) for part in fields(Block))
                if len(blocks) < len(keys) or self.store([(whole, Block(*parts))]) != [Outcome.HIT]:
                    raise RuntimeError("the bench's node did not store all frames")
                ends = list(accumulate(map(len, blocks), initial=0))
                joined |= {key: (whole, *span) for key, span in zip(keys, pairwise(ends), strict=True)}
        self._joined = joined

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        # Index blocks are not joined.
        places = [self._joined.get(key, (key, 0, None)) for key in keys]
        whole = list(dict.fromkeys(key for key, *_ in places))
        loaded = dict(zip(whole, super().load(whole), strict=True))
        return [
            replace(one, block=one.block and one.block.select(slice(*span)))
            for one, span in ((loaded[key], span) for key, *span in places)
        ]


@contextmanager
def remembered(
    model: VisionLanguageModel, watched: Watched, organiser: str, kind: type[RemoteTier] = RemoteTier
) -> Iterator[Remembered]:
    """Store all frames of a clip on a node in another process, and open them in an engine with little host memory."""
    with far_tier(_CAP, kind) as node:
        spec = MemorySpec(compressor="none", organiser=organiser, retriever="top_k", cap_bytes=_CAP)
        watching = StreamMemory(CAMERA, spec, TierStack([Arena(_HOST_STORING, slab_bytes=_SLAB), node]))
        for chunk in watched.chunks:
            watching.add_chunk(chunk)
            if not watching.recent:
                # As production does after each block; this deletes replaced blocks.
                watching.save()
        if not watching.settle() or watching.save() is not Outcome.HIT:
            raise RuntimeError("the bench's node did not accept all frames")
        if isinstance(node, JoinedHeads):
            node.join(watching)
        bank = ListeningBank(TierStack([Arena(_HOST_ASKING, slab_bytes=_SLAB), node]))
        engine = NativeEngine(model, memories=bank)
        bank.open_stream(CAMERA, spec)
        bank.get_memory(CAMERA)[0].settle()
        yield Remembered(
            watched.clip, engine, bank, spec, torch.cat([chunk.key.float() for chunk in watched.chunks], dim=2)
        )
