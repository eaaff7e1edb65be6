"""The model in training: the served transformers modules with gradients, initialisation, packed forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

from cluster.lab.scenes.actors import COLORS
from cluster.lab.scenes.questions import NUMBERS, phrasings
from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.lab.training.config import Shape
from cluster.lab.training.examples import Example
from cluster.lab.training.sequence_layout import Block, SequenceLayout
from cluster.models.base import PatchBatch
from cluster.models.checkpoint import INSTRUCTION, SYSTEM_PROMPT, Checkpoint, preset_tokenizer, untrained
from cluster.models.layers import Rotary, Tower
from cluster.models.loading import initialise
from cluster.models.packed_attention import PACKED, SequencePacking
from cluster.models.qwen2_5_vl import Qwen25VL
from cluster.types import PatchGrid

# Fixed parts of the prompt, one token each.
PHRASES = (
    f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n",
    f"{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n",
)
_MEMORY = (
    "How many people were seen? How many people crossed the picture?",
    "How many vehicles passed? How many vehicles were seen?",
    "Which came first, a person or a vehicle? What was seen first, a vehicle or a person?",
    *(
        f"Did a {color} vehicle pass earlier? Was there a {color} vehicle? Did a {color} vehicle stop here earlier?"
        for color in COLORS
    ),
    *(f"{word} {word}" for word in (*NUMBERS, "person", "vehicle", *COLORS)),
)
# Repetitions of the texts, so that whole words are merged before the vocabulary is full.
_WEIGHT = 20


def demo_tokenizer() -> Any:
    """Train the demo model's tokenizer in memory, deterministically."""
    standing = [text for kind in EVENT_KINDS for text in phrasings(kind)]
    return preset_tokenizer(
        (*Qwen25VL.special_tokens, *PHRASES),
        eos="<|im_end|>",
        pad="<|endoftext|>",
        texts=[*standing, *_MEMORY] * _WEIGHT,
    )


# Regularises the whitening: weak components are sensor noise.
_FLOOR = 0.02


def initialise_for_training(model: TrainableModel, examples: Sequence[Example]) -> None:
    """Data-dependent initialisation, which lowers the loss after 500 small steps by a seventh."""
    _whiten_patch_embedding(model, examples)
    _quieten_blocks(model)


@torch.no_grad()
def _whiten_patch_embedding(model: TrainableModel, examples: Sequence[Example]) -> None:
    """Set the patch embedding to the leading principal components of the examples' patches, scaled to equal variance.

    With random weights every output is little more than mean brightness, as neighbouring pixels are correlated.
    """
    patches = torch.cat([torch.from_numpy(frame.patches) for example in examples for frame in example.frames])
    pixels = model._pixel_values(patches.to(model.device)).float()
    weight = model._visual.patch_embed.proj.weight
    count = weight.shape[0]
    values, vectors = torch.linalg.eigh(pixels.T @ pixels / len(pixels))
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    scale = 1.0 / (values + _FLOOR * values[: count // 2].mean()).sqrt()
    weight.copy_((vectors * scale).T.reshape(weight.shape))


@torch.no_grad()
def _quieten_blocks(model: TrainableModel) -> None:
    """Scale the blocks' output projections by ``1 / sqrt(2 * blocks)``, so that the residual sum has unit scale."""
    for blocks in (model._visual.blocks, model.layers):
        gain = 1.0 / math.sqrt(2 * len(blocks))
        for name, parameter in nn.ModuleList(blocks).named_parameters():
            if name.endswith(("down_proj.weight", "attn.proj.weight", "o_proj.weight")):
                parameter.mul_(gain)


def patch_batches(example: Example, grid: PatchGrid) -> list[PatchBatch]:
    """Tower input of an example, one batch per frame, including empty ones."""
    return [PatchBatch(torch.from_numpy(f.patches), torch.from_numpy(f.cells), grid) for f in example.frames]


# Rows of a pass are padded to a multiple of this, so that shapes recur: each new shape compiles a kernel.
ROWS = 512


@dataclass(frozen=True, slots=True, eq=False)
class SequenceOutput:
    """Hidden states ``[rows, D]`` of packed sequences after the middle layer and the final norm; ``starts``: first
    row of each sequence; ``probes``: for each layer of the second half, queries ``[H, a, d]`` of the probed rows and
    keys ``[Hkv, rows, d]``."""

    middle: Tensor
    last: Tensor
    starts: tuple[int, ...]
    probes: tuple[tuple[Tensor, Tensor], ...] = ()


class _LibraryTower(Tower):
    """Runs transformers' own blocks, so that their weights receive gradients."""

    def __init__(self, visual: Any) -> None:
        self._visual = visual
        visual.config._attn_implementation = PACKED

    def run(self, hidden: Tensor, packings: Sequence[SequencePacking], rotary: Rotary) -> Iterator[Tensor]:
        for block, packing in zip(self._visual.blocks, packings, strict=True):
            # Without ``max_seqlen``, each block would synchronise with the device to compute it.
            lengths = {"cu_seqlens": packing.cu_seqlens, "max_seqlen": packing.longest}
            hidden = block(hidden, **lengths, position_embeddings=rotary, packing=packing)
            yield hidden


class TrainableModel(Qwen25VL):
    """Qwen2.5-VL with gradients. Weights are ``float32``; ``compute``: dtype of activations and matrix products."""

    compute = torch.float32

    @classmethod
    def fresh(cls, shape: Shape, seed: int, device: str = "cpu") -> TrainableModel:
        """An untrained model with the configuration and tokenizer of its export; computes in bfloat16 where the device
        is faster with it."""
        model, _ = untrained(cls, shape.text, shape.vision)
        initialise(model, seed)
        trainable = cls(
            Checkpoint(
                model=model.to(device).train(),
                tokenizer=demo_tokenizer(),
                device=torch.device(device),
                dtype=torch.float32,
                random_weights=False,
                max_pixels=shape.max_pixels,
            )
        )
        trainable._text_model.config._attn_implementation = BLOCKED
        trainable.compute = torch.bfloat16 if _fast_bfloat16(device) else torch.float32
        return trainable

    def encode_frames(self, frames: Sequence[PatchBatch]) -> Tensor:
        """Differentiable :meth:`encode`: visual tokens ``[t, D]`` in order of frames and cells."""
        with self._precision():
            parts = self._parts([frame for frame in frames if len(frame.cells)])
            return torch.cat([tokens for part in parts for tokens in self._encode_kept(part)]).float()

    @cached_property
    def _tower(self) -> Tower:
        return _LibraryTower(self._visual)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.compute, enabled=self.compute != torch.float32)

    def forward_sequences(
        self, visual: Sequence[Tensor], layouts: Sequence[SequenceLayout], asking: Tensor | None = None
    ) -> SequenceOutput:
        """Run packed sequences through the language model; ``visual[i]`` ``[t, D]``: visual tokens of ``layouts[i]``.

        ``asking`` ``[a]``: rows whose attention is probed.
        """
        text = self._text_model
        parts: list[Tensor] = []
        blocks: list[Block] = []
        starts = []
        row = 0
        for tokens, layout in zip(visual, layouts, strict=True):
            ids = torch.tensor([*layout.system, *layout.text], device=self.device)
            words = text.embed_tokens(ids)
            head = len(layout.system)
            parts += [words[:head], tokens, words[head:]]
            blocks += [_shift_block(block, row, self.device, self.compute) for block in layout.blocks]
            starts.append(row)
            row += len(layout)
        filled = -(-row // ROWS) * ROWS
        hidden = F.pad(torch.cat(parts), (0, 0, 0, filled - row)).to(self.compute)
        positions = torch.cat([layout.positions for layout in layouts], dim=1)
        cos, sin = (x.to(self.compute) for x in self.rotary(F.pad(positions, (0, filled - row))))
        middle = hidden
        probed = []
        with self._precision():
            for index, layer in enumerate(self.layers):
                if asking is not None and index >= len(self.layers) // 2:
                    probed.append(probe_attention(hidden, layer, cos, sin, asking))
                hidden = layer(hidden[None], position_embeddings=(cos[None], sin[None]), blocks=blocks)[0]
                if index + 1 == len(self.layers) // 2:
                    middle = hidden
            last = text.norm(hidden)
        return SequenceOutput(middle, last, tuple(starts), tuple(probed))

    def answer_logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, vocab]`` of normalised hidden states ``[n, D]``."""
        return F.linear(hidden.float(), self.model.lm_head.weight)

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self._ids(text)


# -- attention of packed rows in blocks, each over a few ranges of keys ----------------------------
# A live window is not causal: reused tokens were computed in earlier windows, and questions do not see each other. One
# additive mask per block of rows costs a third of a dense mask. transformers' decoder layers look the function up by
# this name.
BLOCKED = "sightline_blocked"


def probe_attention(hidden: Tensor, layer: Any, cos: Tensor, sin: Tensor, asking: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of rows ``asking [a]`` and keys of all rows in a decoder layer: scaled ``query [H, a, d]`` and
    ``key [Hkv, n, d]``, both float32. ``hidden [n, D]``: the layer's input."""
    attention = layer.self_attn
    x = layer.input_layernorm(hidden)
    query = attention.q_proj(x[asking]).view(len(asking), -1, attention.head_dim).transpose(0, 1)[None]
    key = attention.k_proj(x).view(len(x), -1, attention.head_dim).transpose(0, 1)[None]
    query, _ = apply_rotary_pos_emb(query, query, cos[None, asking], sin[None, asking])
    _, key = apply_rotary_pos_emb(key, key, cos[None], sin[None])
    return (query[0] * attention.scaling).float(), key[0].float()


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float) -> Tensor:
    """``query [H, n, d]``, ``key, value [Hkv, n, d]`` -> ``[H, n, d]``; ``blocks`` cover all rows in order."""
    device, kind = query.device, query.dtype
    seen = torch.cat([torch.arange(a, b, device=device) for block in blocks for a, b in block.keys])
    if kind == torch.bfloat16:
        # Every block uses the system prompt's keys: accumulating their gradients in bfloat16 would lose precision.
        key, value = key.float(), value.float()
    # One gather for all blocks: each slice's gradient would allocate a full-size tensor.
    sizes = [block.bias.shape[1] for block in blocks]
    keys, values = (torch.split(x.index_select(1, seen).to(kind), sizes, dim=1) for x in (key, value))
    queries = torch.split(query, [block.stop - block.start for block in blocks], dim=1)
    return torch.cat(
        [
            F.scaled_dot_product_attention(
                q[None], k[None], v[None], block.bias.to(kind)[None, None], scale=scale, enable_gqa=True
            )[0]
            for q, k, v, block in zip(queries, keys, values, blocks, strict=True)
        ],
        dim=1,
    )


def _attend(
    module: nn.Module,  # noqa: ARG001 the signature is transformers'
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,  # noqa: ARG001
    *,
    blocks: Sequence[Block],
    scaling: float,
    **kwargs: Any,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """``query, key, value [1, h, n, d]`` -> ``[1, n, h, d]``; padding rows after the last block are zero."""
    rows = blocks[-1].stop
    kind = value.dtype
    attended = blocked_attention(
        query[0, :, :rows].to(kind), key[0, :, :rows].to(kind), value[0, :, :rows], blocks, scaling
    )
    return F.pad(attended.transpose(0, 1), (0, 0, 0, 0, 0, query.shape[2] - rows))[None], None


AttentionInterface.register(BLOCKED, _attend)


def _fast_bfloat16(device: str) -> bool:
    """Whether bfloat16 matrix products are faster than float32 on this device."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.cpu._is_avx512_bf16_supported()


def _shift_block(block: Block, rows: int, device: torch.device, dtype: torch.dtype) -> Block:
    keys = tuple((a + rows, b + rows) for a, b in block.keys)
    return Block(block.start + rows, block.stop + rows, keys, block.bias.to(device, dtype))
