"""What frames retrieve from the past during prefill (ReSV) and its cost, on real clips.

Two engines answer the same windows, with and without the policy; a third records what is selected. The reference is the
attention of a frame's own queries to all past keys, each rotated to its position before the window.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cluster.engine.native.engine import NativeEngine
from cluster.engine.native.frame_retrieval import FramePast
from cluster.engine.native.plan import Prompt, WindowPlan
from cluster.engine.window.kv import rotate_wide
from cluster.engine.window.step import WindowStats, WindowWork
from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.memory.footage import Footage, Listener, ListeningBank
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieval_session import RetrievedKV
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.types import FrameSample, MemorySpec

TOP = 64
"""Most attended past tokens per frame, layer and head, which should be among those read."""

_CAP = 2**30


def measure(footage: Footage) -> BenchResult:
    """Figures, each the worst of the clips: ``frames_read_share`` (of past tokens, including waiting ones),
    ``frames_attention_read`` (of the attention to clustered tokens, which the policy's ratio targets),
    ``frames_top_recall`` (of the ``TOP`` tokens) and ``frames_time_ratio`` (language model time of windows that read,
    with over without the policy). Raises ``ConfigError`` if a clip is too short for any read."""
    rows = [_clip(footage, clip, samples) for clip, samples in footage.samples(footage.args.model)]
    figures = {
        "frames_read_share": max(row["read_share"] for row in rows),
        "frames_attention_read": min(row["attention_read"] for row in rows),
        "frames_top_recall": min(row["top_recall"] for row in rows),
        "frames_time_ratio": max(row["time_ratio"] for row in rows),
    }
    note = (
        f"per reading frame; held, read: tokens per layer and head; recall: of the {TOP} most attended clustered past "
        "tokens; best_clusters: attention to at most as many tokens, in clusters chosen by true attention; model "
        f"{footage.args.model}"
    )
    return BenchResult(figures, rows, [note])


def _clip(footage: Footage, clip: str, samples: Sequence[FrameSample]) -> dict[str, Any]:
    model = footage.model(footage.args.model)
    kinds = {"without": (NativeEngine, None), "with": (NativeEngine, "resv"), "seen": (WatchedEngine, "resv")}
    engines: dict[str, NativeEngine] = {}
    for name, (kind, policy) in kinds.items():
        engines[name] = kind(model, memories=ListeningBank(TierStack([Arena(_CAP)])))
        memory = MemorySpec(
            compressor="none", cap_bytes=_CAP, frame_retrieval=policy, organiser_options={"centred": True}
        )
        # Compute each frame once, when it is new.
        engines[name].admit(replace(footage.spec(memory), refresh="none"))
    windows: dict[str, list[WindowStats]] = {name: [] for name in engines}
    for sample in samples:
        for name, engine in engines.items():
            for request in engine.push(sample):
                engine.step([request])
                windows[name] += engine.stats.windows
            assert engine.memories is not None
            # Frames arriving faster than they can be written would be dropped.
            engine.memories.wait_written()
    watched = engines["seen"]
    assert isinstance(watched, WatchedEngine)
    if not watched.recalls:
        raise ConfigError(f"{clip}: no frame read a cluster in {footage.args.seconds:g} s; increase --seconds")
    reading = [place for place, stats in enumerate(windows["with"]) if stats.reads.frames]
    spent = {name: sum(windows[name][place].timing.llm_s for place in reading) for name in ("without", "with")}
    reads = [windows["with"][place].reads for place in reading]
    frames = sum(each.frames for each in reads)
    heads = len(model.layers) * model.text_config.num_key_value_heads
    held, read = sum(each.held_tokens for each in reads), sum(each.read_tokens for each in reads)
    return {
        "clip": clip,
        "frames": frames,
        "held": held / frames / heads,
        "read": read / frames / heads,
        "read_share": read / held,
        "clustered_share": statistics.fmean(watched.shares),
        "top_recall": statistics.fmean(watched.recalls),
        "attention_read": statistics.fmean(watched.masses),
        "best_clusters": statistics.fmean(watched.bests),
        "ms_without": 1000 * spent["without"] / frames,
        "ms_with": 1000 * spent["with"] / frames,
        "time_ratio": spent["with"] / spent["without"],
        "mib_read": sum(each.bytes for each in reads) / frames / 2**20,
        "waited_ms": 1000 * sum(each.waited_s for each in reads) / frames,
        "late": sum(each.unavailable for each in reads),
    }


class WatchedEngine(NativeEngine):
    """An engine that compares what frames select with what they attend to, per frame, layer and head.

    * ``recalls``: read share of the ``TOP`` most attended tokens; ``shares``: read share of all clustered tokens, which
      is the recall of a random choice
    * ``masses``: share of the attention that goes to tokens read; ``bests``: the same with at most as many tokens, in
      clusters chosen by true attention
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.recalls: list[float] = []
        self.shares: list[float] = []
        self.masses: list[float] = []
        self.bests: list[float] = []
        # Rotary tables by frame time.
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}

    def _plan_rows(self, each: WindowWork, prompts: Sequence[Prompt], *, watch: bool = False) -> WindowPlan:
        plan = super()._plan_rows(each, prompts, watch=watch)
        new = [frame for frame in plan.frames if frame.computed is None and frame.tokens is not None and frame.size]
        for frame in new:
            assert frame.positions is not None
            self._rotary[frame.pts] = self.model.rotary(frame.positions)
        past = plan.work.past
        if isinstance(past, FramePast):
            listener = past.session.retriever = Listener(past.session.retriever)
            close = past.close

            def compare() -> None:
                close()
                self._compare(listener, past, [frame.pts for frame in new])

            past.close = compare  # type: ignore[method-assign]
        return plan

    def _compare(self, listener: Listener, past: FramePast, new: Sequence[int]) -> None:
        keys: dict[int, Tensor] = {}
        # Each layer retrieves for one frame after the other.
        for number, (query, tables, named) in enumerate(listener.calls):
            layer, at = divmod(number, len(new))
            if layer not in keys:
                keys[layer] = self._past_keys(past, layer, len(tables[0].of_token))
            cos, sin = self._rotary[new[at]]
            # Group the query heads of each token.
            rows = query.view(len(query), len(cos), -1, query.shape[2]).transpose(1, 2)
            rows = rotate_wide(rows, cos, sin).flatten(1, 2)
            for h, (table, chosen) in enumerate(zip(tables, named, strict=True)):
                mass = _attention(rows[h], keys[layer][h, : table.tokens])
                self.recalls.append(float(chosen[mass.topk(min(TOP, len(mass))).indices].float().mean()))
                self.shares.append(float(chosen.float().mean()))
                self.masses.append(float(mass[chosen].sum() / mass.sum()))
                self.bests.append(best_clusters(mass, table, int(chosen.sum())))

    def _past_keys(self, past: FramePast, layer: int, tokens: int) -> Tensor:
        """Keys of the oldest tokens ``[Hkv, n, D]`` after rotary; nothing is evicted, so that the memory numbers frames
        in order of arrival."""
        assert isinstance(self.memories, ListeningBank)
        chunks = self.memories.chunks
        key = torch.cat([chunk.key[layer].float() for chunk in chunks], dim=1)[:, :tokens]
        places = torch.cat([torch.stack([torch.full_like(c.cell, n), c.cell]) for n, c in enumerate(chunks)], dim=1)
        frame, cell = places[:, None, :tokens].expand(-1, len(key), -1)
        there = torch.ones_like(frame, dtype=torch.bool)
        return past.rotated(layer, RetrievedKV(key, key, frame, cell, there, frame.numel()))


def _attention(rows: Tensor, keys: Tensor) -> Tensor:
    """Attention mass per key ``[n]``, summed over all rows ``[r, D]``."""
    return (rows.float() @ keys.T / math.sqrt(keys.shape[1])).softmax(1).sum(0)


def best_clusters(mass: Tensor, table: ClusterTable, tokens: int) -> float:
    """Share of the attention ``mass [n]`` in the clusters with the most mass per token, up to ``tokens`` tokens."""
    of_cluster = mass.new_zeros(len(table)).index_add_(0, table.of_token, mass)
    order = (of_cluster / table.count).argsort(descending=True)
    taken = table.count[order].cumsum(0) <= tokens
    return float(of_cluster[order[taken]].sum() / mass.sum())
