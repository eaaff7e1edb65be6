"""What the engine must compute, written the slow and obvious way: one window at a time, dense masks, no runs, no slabs.

Shares with the engine only the model itself. KV is kept per frame in dictionaries; in every layer the keys of tokens
that are not computed are replaced, explicitly, by those kept from earlier windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from cluster.lab.bench.faults.positions import RULES, SeenFrame
from cluster.models.base import FrameTokens, PatchBatch, VisionLanguageModel
from cluster.types import MICROSECONDS, FrameSample

# Given a layer above the first and the KV there of all overlap tokens, new and old: which of them it computes.
Thin = Callable[[int, np.ndarray, Tensor, Tensor], np.ndarray]


def tokens_of(model: VisionLanguageModel, sample: FrameSample) -> FrameTokens:
    """One frame alone through the tower; its stream began at 0."""
    merge = sample.grid.merge
    cells = torch.from_numpy(np.argwhere(sample.mask[::merge, ::merge]))
    return model.encode([PatchBatch(torch.from_numpy(sample.patches), cells, sample.grid, sample.pts / MICROSECONDS)])[
        0
    ]


@dataclass
class DenseOracle:
    """Stale-KV semantics of one stream."""

    model: VisionLanguageModel
    # frame index -> raw keys and values [2, L, t, Hkv, d]
    kv: dict[int, Tensor] = field(default_factory=dict)
    # frame index -> what the tower made of it
    _tokens: dict[int, FrameTokens] = field(default_factory=dict)

    @torch.no_grad()
    def window(
        self,
        samples: Sequence[FrameSample],
        computed: np.ndarray,
        questions: Sequence[str],
        thin: Thin | None = None,
    ) -> list[Tensor]:
        """Logits ``[vocab]`` per question. ``computed``: which visual tokens to compute; the rest must be in ``kv``."""
        for sample in samples:
            if sample.index not in self._tokens:
                self._tokens[sample.index] = tokens_of(self.model, sample)
        frames = [self._tokens[sample.index] for sample in samples]
        logits = []
        for question in questions:
            answer, fresh = self._run(samples, frames, computed.copy(), question, thin)
            logits.append(answer)
        start = 0
        for sample, frame in zip(samples, frames, strict=True):
            self.kv[sample.index] = fresh[:, :, start : start + len(frame)]
            start += len(frame)
        return logits

    def _run(
        self,
        samples: Sequence[FrameSample],
        frames: Sequence[FrameTokens],
        computed: np.ndarray,
        question: str,
        thin: Thin | None,
    ) -> tuple[Tensor, Tensor]:
        model, config = self.model, self.model.text_config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = config.hidden_size // heads
        system, ask = model.system_ids(), model.question_ids(question)
        visual = len(computed)
        overlap = sum(len(f) for s, f in zip(samples, frames, strict=True) if s.index in self.kv)
        cos, sin = model.rotary(self._positions(samples, frames, len(system), len(ask)))
        embeds = torch.cat(
            [model.embed(torch.tensor(system)), *(frame.embeds for frame in frames), model.embed(torch.tensor(ask))]
        )
        # What the first layers add to their output, behind the embedding itself.
        hidden, *added = embeds.split(config.hidden_size, dim=1)
        no_norm = torch.nn.Identity()
        count = len(hidden)
        causal = torch.full((count, count), float("-inf"), device=model.device).triu(1)
        held = torch.zeros(2, len(model.layers), visual, kv_heads, size, device=model.device)
        start = 0
        for sample, frame in zip(samples, frames, strict=True):
            if sample.index in self.kv:
                held[:, :, start : start + len(frame)] = self.kv[sample.index]
            start += len(frame)
        old = held.clone()
        inner = slice(len(system), len(system) + visual)
        for index, layer in enumerate(model.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            k = getattr(attention, "k_norm", no_norm)(attention.k_proj(normed).view(count, kv_heads, size))
            v = attention.v_proj(normed).view(count, kv_heads, size)
            if thin is not None and index > 0:
                new = torch.stack([k[inner], v[inner]])[:, :overlap]
                computed[:overlap] = thin(index, computed[:overlap], new, old[:, index, :overlap])
            active = torch.ones(count, dtype=torch.bool, device=model.device)
            active[inner] = torch.from_numpy(computed).to(model.device)
            stale = ~active
            k[stale], v[stale] = old[0, index][stale[inner]], old[1, index][stale[inner]]
            held[0, index], held[1, index] = k[inner], v[inner]
            q = getattr(attention, "q_norm", no_norm)(attention.q_proj(normed).view(count, heads, size))
            q_r, k_r = apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None], unsqueeze_dim=2)
            attended = torch.zeros_like(q)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                weights = torch.softmax(q_r[0, :, head] @ k_r[0, :, shared].T * attention.scaling + causal, dim=-1)
                attended[:, head] = weights @ v[:, shared]
            after = hidden + attention.o_proj(attended.reshape(count, -1))
            after = after + layer.mlp(layer.post_attention_layernorm(after))
            if index < len(added):
                after = after + added[index]
            # What is not computed has no hidden state: make sure that nobody reads one.
            after[stale] = float("nan")
            hidden = torch.where(active[:, None], after, torch.zeros((), device=model.device))
        return model.logits(hidden[-1:])[0], held

    def _positions(
        self, samples: Sequence[FrameSample], frames: Sequence[FrameTokens], system: int, ask: int
    ) -> Tensor:
        """By the published rule, not by the model's own code."""
        seen = [
            SeenFrame(
                Fraction(sample.pts - samples[0].pts, MICROSECONDS),
                sample.grid.group_rows,
                sample.grid.group_cols,
                [(row, column) for row, column in frame.cells.tolist()],
            )
            for sample, frame in zip(samples, frames, strict=True)
        ]
        rate = getattr(self.model.model.config.vision_config, "tokens_per_second", 0)
        return torch.tensor(RULES[self.model.family](system, seen, ask, rate)).T
