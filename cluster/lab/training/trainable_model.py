"""The model in training: the served transformers modules with gradients, initialisation, packed forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.lab.scenes.actors import COLORS
from cluster.lab.scenes.questions import NUMBERS, phrasings
from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.lab.training.attention import (
    Block,
    PackedSequences,
    decoder_layer,
    linear,
    pad_rows,
    probe_attention,
    rms_norm,
    round_up_rows,
    tower_block,
)
from cluster.lab.training.config import Shape
from cluster.lab.training.examples import Example
from cluster.lab.training.sequence_layout import SequenceLayout
from cluster.models.base import PatchBatch
from cluster.models.checkpoint import INSTRUCTION, SYSTEM_PROMPT, Checkpoint, preset_tokenizer
from cluster.models.packed_attention import row_numbers
from cluster.models.presets import initialise
from cluster.models.qwen2_5_vl import SPECIAL_TOKENS, Qwen25VL
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
# Repetitions of the texts, so that words are merged before the vocabulary is full.
_WEIGHT = 20


def demo_tokenizer() -> Any:
    """Tokenizer trained in memory, deterministic."""
    standing = [text for kind in EVENT_KINDS for text in phrasings(kind)]
    return preset_tokenizer(
        (*SPECIAL_TOKENS, *PHRASES),
        eos="<|im_end|>",
        pad="<|endoftext|>",
        texts=[*standing, *_MEMORY] * _WEIGHT,
    )


# Regularises weak components, which are sensor noise.
_FLOOR = 0.02


def initialise_for_training(model: TrainableModel, examples: Sequence[Example]) -> None:
    """Data-dependent initialisation; after 500 small steps the loss is a seventh lower with it."""
    _whiten_patch_embedding(model, examples)
    _quieten_blocks(model)


@torch.no_grad()
def _whiten_patch_embedding(model: TrainableModel, examples: Sequence[Example]) -> None:
    """Sets the patch embedding to the leading principal components of the examples' patches, scaled to equal variance.

    With random weights every output is little more than the patch's brightness, as neighbouring pixels are correlated.
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
    """Scales every block's output layers by one over the root of their number: the sum of all has unit scale."""
    for blocks in (model._visual.blocks, model.layers):
        gain = 1.0 / math.sqrt(2 * len(blocks))
        for name, parameter in nn.ModuleList(blocks).named_parameters():
            if name.endswith(("down_proj.weight", "attn.proj.weight", "o_proj.weight")):
                parameter.mul_(gain)


def patch_batches(example: Example, grid: PatchGrid) -> list[PatchBatch]:
    """Frames of an example as the tower's input, including empty ones."""
    return [PatchBatch(torch.from_numpy(f.patches), torch.from_numpy(f.cells), grid) for f in example.frames]


# Patches per tower pass: on a CPU activations should fit into the caches.
PATCHES_PER_PASS = {"cpu": 4224, "cuda": 1 << 30}


@dataclass(frozen=True, slots=True, eq=False)
class SequenceOutput:
    """Hidden states ``[rows, D]`` of packed sequences at half depth and at the end (normed); ``starts``: first row of
    each sequence; ``probes``: for each layer of the second half, queries ``[H, a, d]`` of the probed rows and keys
    ``[Hkv, rows, d]``."""

    middle: Tensor
    last: Tensor
    starts: tuple[int, ...]
    probes: tuple[tuple[Tensor, Tensor], ...] = ()


class TrainableModel(Qwen25VL):
    """Qwen2.5-VL with gradients. Weights are ``float32``; ``compute``: type of activations and products."""

    compute = torch.float32

    @classmethod
    def fresh(
        cls, shape: Shape, seed: int, device: str = "cpu", *, compute: torch.dtype | None = None
    ) -> TrainableModel:
        """An untrained model with the configuration and tokenizer it is exported with.

        ``compute``: default is bfloat16 where it is fast.
        """
        model, _ = cls.untrained(shape.text, shape.vision)
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
        trainable.compute = compute or (torch.bfloat16 if _fast_bfloat16(device) else torch.float32)
        return trainable

    def encode_frames(self, frames: Sequence[PatchBatch]) -> Tensor:
        """Visual tokens ``[t, D]`` of frames, in order of frames and cells: :meth:`encode` with gradients."""
        limit = PATCHES_PER_PASS[self.device.type]
        parts: list[list[PatchBatch]] = []
        room = 0
        for frame in frames:
            if not len(frame.cells):
                continue
            if len(frame.patches) > room:
                parts.append([])
                room = limit
            parts[-1].append(frame)
            room -= len(frame.patches)
        return torch.cat([self._encode_pass(part) for part in parts])

    def _encode_pass(self, kept: Sequence[PatchBatch]) -> Tensor:
        """One pass. Windows of equal length are adjacent, so that windowed layers need no reordering."""
        merge, unit = self.geometry.merge, self.geometry.merge**2
        counts = torch.tensor([len(frame.cells) for frame in kept])
        cells = torch.cat([frame.cells for frame in kept])
        frame_of = torch.repeat_interleave(torch.arange(len(kept)), counts)
        side = self._visual.window_size // merge // self._visual.patch_size
        grouped = torch.cat([frame_of[:, None], cells // side], dim=1)
        _, window_of, lengths = torch.unique(grouped, dim=0, return_inverse=True, return_counts=True)
        order = torch.argsort(row_numbers(torch.stack([lengths[window_of], window_of], dim=1)), stable=True)
        windowed = PackedSequences.of(lengths.sort().values * unit).runs
        full = _pack_by_frame(frame_of[order], counts, unit).to(self.device)
        positions = self._patch_positions(cells[order].to(self.device))
        cos, sin = (
            x[:, None, None].to(self.compute)
            for x in self._visual.rotary_pos_emb(torch.empty(0, device=self.device), positions)
        )
        order = order.to(self.device)
        back = torch.argsort(order)

        patches = torch.cat([frame.patches for frame in kept]).to(self.device)
        patches = patches.view(len(cells), -1).index_select(0, order).view(len(patches), -1)
        rows = len(patches)
        filled = round_up_rows(rows)
        hidden = self._embed(pad_rows(patches, filled))
        cos, sin = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, filled - rows)) for x in (cos, sin))
        for index, block in enumerate(self._visual.blocks):
            among = full if index in self._visual.fullatt_block_indexes else windowed
            hidden = tower_block(hidden, rows, block, cos, sin, among)
        merger = self._visual.merger
        merged = rms_norm(hidden, merger.ln_q).view(filled // unit, -1)
        merged = linear(F.gelu(linear(merged, merger.mlp[0])), merger.mlp[2])
        return merged[: len(cells)][back].float()

    def _embed(self, patches: Tensor) -> Tensor:
        """``[n, T * C * p * p]`` uint8 -> ``[n, D]``; normalisation is folded into the weights."""
        projection = self._visual.patch_embed.proj.weight
        scale = torch.tensor([1 / (255 * std) for std in self.std], device=self.device).view(1, 3, 1, 1, 1)
        # Centred on grey, as bfloat16 is most precise near zero.
        shift = torch.tensor([128 / 255 - mean for mean in self.mean], device=self.device) * 255
        weight = projection * scale
        bias = (weight * shift.view(1, 3, 1, 1, 1)).flatten(1).sum(1)
        weight = weight.transpose(1, 2).flatten(1).to(self.compute)
        return F.linear(patches.to(self.compute).sub_(128), weight, bias.to(self.compute))

    def forward_sequences(
        self, visual: Sequence[Tensor], layouts: Sequence[SequenceLayout], asking: Tensor | None = None
    ) -> SequenceOutput:
        """Run sequences through the language model; ``visual[i]`` ``[t, D]``: visual tokens of ``layouts[i]``.

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
        filled = round_up_rows(row)
        hidden = pad_rows(torch.cat(parts), filled).to(self.compute)
        positions = torch.cat([layout.positions for layout in layouts], dim=1)
        cos, sin = (x.to(self.compute) for x in self.rotary(F.pad(positions, (0, filled - row))))
        middle = hidden
        probed = []
        for index, layer in enumerate(self.layers):
            if asking is not None and index >= len(self.layers) // 2:
                probed.append(probe_attention(hidden, layer, cos, sin, asking))
            hidden = decoder_layer(hidden, layer, cos, sin, blocks)
            if index + 1 == len(self.layers) // 2:
                middle = hidden
        return SequenceOutput(middle, rms_norm(hidden, text.norm), tuple(starts), tuple(probed))

    def answer_logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, vocab]`` of normed hidden states ``[n, D]``."""
        return F.linear(hidden.float(), self.model.lm_head.weight)

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""
        return self._ids(text)


def _fast_bfloat16(device: str) -> bool:
    """Whether bfloat16 products are faster than float32 on this device."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.cpu._is_avx512_bf16_supported()


def _pack_by_frame(frame_of: Tensor, counts: Tensor, unit: int) -> PackedSequences:
    """Groups of frames ``[groups]`` (frame ``f`` has ``counts[f]``) -> their patches, packed by frame."""
    lengths = counts[frame_of]
    groups = torch.argsort(row_numbers(torch.stack([lengths, frame_of], dim=1)), stable=True)
    order = (groups[:, None] * unit + torch.arange(unit)).flatten()
    return PackedSequences(order, torch.argsort(order), PackedSequences.of(counts.sort().values * unit).runs)


def _shift_block(block: Block, rows: int, device: torch.device, dtype: torch.dtype) -> Block:
    keys = tuple((a + rows, b + rows) for a, b in block.keys)
    return Block(block.start + rows, block.stop + rows, keys, block.bias.to(device, dtype))
