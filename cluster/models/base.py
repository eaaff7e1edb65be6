"""Interface of a vision-language model family: one file and one registry entry each.

A family wraps a transformers model class and adds packing of patches through the tower, text tokens around a frame,
token positions, and rotary embeddings. Loading and linear layers remain transformers'.
"""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.errors import ModelError
from cluster.models.checkpoint import (
    INSTRUCTION,
    PATCHES_PER_PASS,
    SYSTEM_PROMPT,
    Checkpoint,
    fuse_norms,
    head_size,
    linear_weights,
    weights_digest,
)
from cluster.models.float8 import use_float8
from cluster.models.layers import DecoderLayer, Rotary, check_language_model, key_bias
from cluster.models.upload import to_device, upload
from cluster.types import PatchGeometry, PatchGrid


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """Kept patches of one frame, ready for the tower.

    * ``patches`` ``[n, T, C, p, p]`` uint8 in group order (see ``FrameSample``)
    * ``cells`` ``[n / merge**2, 2]`` int64: (row, col) of each group on the merged grid, row-major
    * ``time_s``: the frame's time in its stream's own time, for families that write it before the frame
    """

    patches: Tensor
    cells: Tensor
    grid: PatchGrid
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FrameTokens:
    """One frame as the language model sees it: visual tokens and any text around them.

    * ``embeds`` ``[t, W]``: the embedding, then the parts that early layers add (see :meth:`VisionLanguageModel.embed`)
    * ``cells`` ``[t, 2]`` int64: (row, col) on the merged grid; (-1, k) for the k-th text token of the frame
    """

    embeds: Tensor
    cells: Tensor
    grid: PatchGrid
    # Cached, because it is read hundreds of times per window.
    count: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", int(self.embeds.shape[0]))

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """A frame's placement in a window: seconds and slot (number of frames) since the window's first frame, and the
    cells of its tokens."""

    time_s: float
    slot: int
    cells: Tensor
    grid: PatchGrid


@dataclass(frozen=True, slots=True)
class WindowPositions:
    """Positions in one window: ``frames[i]`` ``[3, t_i]`` int64; ``next``: position of the first question token."""

    frames: list[Tensor]
    next: int


class VisionLanguageModel(ABC):
    """A transformers checkpoint of one family on one device, in evaluation mode, without gradients.

    ``random_weights``: an untrained preset, whose answers are meaningless. ``settings``: from its ``sightline.json``.
    """

    family: ClassVar[str]
    # transformers' configuration and model class. For presets: special tokens (padding first) and the one that ends an
    # answer; config entries that name a token; the tower's config entry for the language model's width.
    library: ClassVar[tuple[Any, Any]]
    special_tokens: ClassVar[tuple[str, ...]]
    end_token: ClassVar[str] = "<|im_end|>"
    placeholders: ClassVar[Mapping[str, str]]
    tower_width: ClassVar[str | None] = None
    # How tokens get their positions, in words.
    position_rule: ClassVar[str]
    # Special tokens of the prompt; a tokenizer that does not know one of them is refused.
    prompt_tokens: ClassVar[tuple[str, ...]]
    # The chat template in parts: up to the user's turn, from there to the user's text, from the question to the answer,
    # and from the answer to the next question.
    chat_system: ClassVar[str] = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
    chat_user: ClassVar[str] = "<|im_start|>user\n"
    chat_answer: ClassVar[str] = "<|im_end|>\n<|im_start|>assistant\n"
    chat_follow_up: ClassVar[str] = "<|im_end|>\n<|im_start|>user\n"
    # Position axes that a frame's place shifts: time alone, or all.
    moving_axes: ClassVar[tuple[int, int, int]] = (1, 0, 0)
    # Text before the first frame and after the last.
    video_brackets: ClassVar[tuple[str, str]] = ("", "")
    # Pixel statistics (RGB) for checkpoints without an image processor.
    pixel_mean: ClassVar[tuple[float, ...]]
    pixel_std: ClassVar[tuple[float, ...]]

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = checkpoint.model
        self.tokenizer = checkpoint.tokenizer
        self.device = checkpoint.device
        self.dtype = checkpoint.dtype
        self.random_weights = checkpoint.random_weights
        self.settings = checkpoint.settings
        self.mean, self.std = checkpoint.mean or self.pixel_mean, checkpoint.std or self.pixel_std
        check_language_model(self.text_config)
        self.geometry = self._geometry(checkpoint)
        fuse_norms(self.model)
        for token in self.prompt_tokens:
            self._require(token)
        self.yes_no_ids()
        profile = self.settings.layer_profile
        if len(profile) not in (0, len(self.layers)):
            raise ModelError(f"layer_profile has {len(profile)} entries, but the model has {len(self.layers)} layers")

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all that KV depends on besides the video: weights, configuration, pixel statistics and prompt."""
        # The checkpoint's path and the transformers version may differ between replicas.
        config = self.model.config.to_dict() | {"_name_or_path": "", "transformers_version": ""}
        parts = weights_digest(self.model), self.family, self.dtype, config, self.mean, self.std, self.system_ids()
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    # -- implemented by a family ------------------------------------------------------------------
    @abstractmethod
    def _geometry(self, checkpoint: Checkpoint) -> PatchGeometry:
        """Patch size, merge factor and temporal patch of the checkpoint. Raises ``ModelError``: a shape that the pruned
        tower cannot serve."""

    @property
    def _text_model(self) -> Any:
        return self.model.model.language_model

    @abstractmethod
    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """Visual tokens ``[t, W]`` per frame, in order of cells; every frame has at least one kept patch."""

    def _frame_text(self, frame: PatchBatch) -> tuple[list[int], list[int]]:
        """Token ids of the text before and after a frame; equally many for every frame."""
        del frame
        return [], []

    def frame_text_tokens(self, grid: PatchGrid) -> int:
        nothing = torch.zeros(0, dtype=torch.uint8)
        return sum(map(len, self._frame_text(PatchBatch(nothing, nothing, grid))))

    # -- vision -----------------------------------------------------------------------------------
    @torch.no_grad()
    def encode(self, frames: Sequence[PatchBatch]) -> list[FrameTokens]:
        """Encode the kept patches of many frames (of any streams) in packed tower calls.

        Frames never attend to each other. With every patch kept, the result equals that of transformers' tower. A frame
        without patches gives a ``FrameTokens`` of length 0, without text.
        """
        kept = [frame for frame in frames if frame.cells.shape[0]]
        visual = [tokens for part in self._parts(kept) for tokens in self._encode_kept(part)]
        texts = [self._frame_text(frame) for frame in kept]
        text = self.embed(torch.tensor([i for before, after in texts for i in (*before, *after)], dtype=torch.int64))
        sources, cells = visual, [frame.cells for frame in kept]
        if len(text):
            before, after = map(len, texts[0])
            around = iter(torch.split(text, [before, after] * len(kept)))
            whole = torch.cat([part for seen in visual for part in (next(around), seen, next(around))])
            # Cells of text tokens: (-1, k) for the k-th of a frame.
            head, tail = torch.split(F.pad(torch.arange(before + after)[:, None], (1, 0), value=-1), [before, after])
            counts = [before + len(each) + after for each in cells]
            placed = torch.cat([part for each in cells for part in (head, each, tail)])
            cells, sources = list(torch.split(placed, counts)), list(torch.split(whole, counts))
        # Copied per frame: a view would keep the whole call's embeddings alive (for cells, that matters little).
        own = [torch.empty(each.shape, dtype=text.dtype, device=text.device) for each in sources]
        if own:
            torch._foreach_copy_(own, sources)
        done = (FrameTokens(a, b, frame.grid) for a, b, frame in zip(own, cells, kept, strict=True))
        nothing = text[:0].clone()
        return [next(done) if len(each.cells) else FrameTokens(nothing, each.cells, each.grid) for each in frames]

    def _parts(self, frames: Sequence[PatchBatch]) -> list[list[PatchBatch]]:
        limit = PATCHES_PER_PASS.get(self.device.type, PATCHES_PER_PASS["cuda"])
        parts: list[list[PatchBatch]] = []
        left = 0
        for frame in frames:
            count = frame.patches.shape[0]
            if count > left:
                parts.append([])
                left = limit
            parts[-1].append(frame)
            left -= count
        return parts

    def _upload(self, frames: Sequence[PatchBatch]) -> Tensor:
        """Kept patches of all frames ``[n, T, C, p, p]``, on the device."""
        return upload([frame.patches for frame in frames], self.device)

    def _patch_positions(self, cells: Tensor) -> Tensor:
        """Group cells ``[g, 2]`` -> (row, col) of each of their patches ``[g * merge**2, 2]``."""
        merge = self.geometry.merge
        inner = torch.cartesian_prod(*[torch.arange(merge, device=cells.device)] * 2)
        return (cells[:, None] * merge + inner).flatten(0, 1)

    # -- text -----------------------------------------------------------------------------------
    def system_ids(self) -> list[int]:
        """Token ids before the first frame, the same for every stream, so that their KV is computed once and shared."""
        return self._ids(self.chat_system + self.chat_user + self.video_brackets[0])

    def question_ids(self, text: str) -> list[int]:
        """Token ids from the end of the last frame up to the answer."""
        return self._prompt_ids(self.video_brackets[1], text, f"{INSTRUCTION}{self.chat_answer}")

    def ask_ids(self, text: str, *, follow_up: bool = False) -> list[int]:
        """:meth:`question_ids` of a free question; ``follow_up``: after the last answer instead of the last frame. The
        checkpoint's ``open_instruction``, if any, follows the question."""
        before = self.chat_follow_up if follow_up else self.video_brackets[1]
        return self._prompt_ids(before, text, f"{self.settings.open_instruction or ''}{self.chat_answer}")

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt_ids(self, before: str, text: str, after: str) -> list[int]:
        """Token ids of a template around untrusted ``text``; special tokens in the text are tokenised as plain
        characters. Text without any is tokenised together with the template, as in training."""
        together, around = self._ids(before + text + after), [*self._ids(before), *self._ids(after)]
        if self._special_among(together) == self._special_among(around):
            return together
        return [*self._ids(before), *self.text_ids(text), *self._ids(after)]

    def text_ids(self, text: str) -> list[int]:
        """Token ids of untrusted text alone, without special tokens."""
        plain = list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if not self._special_among(plain):
            return plain
        # Left are tokens such as <tool_call>, which a tokenizer splits off without marking them as special.
        return [token for letter in text for token in self._ids(letter)]

    def _special_among(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._special]

    @cached_property
    def _special(self) -> frozenset[int]:
        """Token ids that untrusted text must not contain: special tokens and other bracketed ones."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(
            number
            for number, token in added
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        )

    def _require(self, token: str) -> None:
        found = self.tokenizer.convert_tokens_to_ids(token)
        if found is None or found == self.tokenizer.unk_token_id or found >= self.text_config.vocab_size:
            raise ModelError(
                f"the tokenizer of {self.model.name_or_path or self.family} has no token {token!r} known to the model; "
                "use the tokenizer that the checkpoint came with"
            )

    def yes_no_ids(self) -> tuple[list[int], list[int]]:
        """Token ids that count as yes and as no as an answer's first token (case and space variants)."""
        yes, no = self._first_ids(("yes", "Yes", "YES")), self._first_ids(("no", "No", "NO"))
        # A first token shared by both answers does not tell them apart.
        shared = yes & no
        if not yes - shared or not no - shared:
            raise ModelError(f"the tokenizer of {self.family} cannot tell yes from no by the answer's first token")
        return sorted(yes - shared), sorted(no - shared)

    def _first_ids(self, words: Sequence[str]) -> set[int]:
        """Tokens equal to one of the words; only without any, tokens that begin one ("Y" also begins "You")."""
        spelled = [self._ids(variant) for word in words for variant in (word, f" {word}")]
        return {ids[0] for ids in spelled if len(ids) == 1} or {self._ids(word)[0] for word in words}

    # -- positions ------------------------------------------------------------------------------
    @abstractmethod
    def frame_place(self, time_s: float, slot: int, grid: PatchGrid) -> int:
        """Place of a frame on the first position axis, counted from time 0."""

    @abstractmethod
    def next_position(self, first: int, place: int, grid: PatchGrid) -> int:
        """Position of the text after a window whose last frame is ``place`` after its first one."""

    @abstractmethod
    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """Positions ``[3, n]`` of tokens at ``time_s [n]`` float64, ``slot [n]`` and ``cells [n, 2]``; ``first``:
        position of the first frame's first token."""

    def window_positions(self, first: int, frames: Sequence[FrameSpan]) -> WindowPositions:
        """Positions of a window's tokens in the unpruned layout, in which pruned tokens leave gaps; ``first``: the
        position after the system prompt."""
        places = [(self.frame_place(each.time_s, each.slot, each.grid), each.grid) for each in frames]
        end = max([first, *(self.next_position(first, place, grid) for place, grid in places)])
        return WindowPositions(self.frame_positions(first, frames), end)

    def frame_positions(self, first: int, frames: Sequence[FrameSpan]) -> list[Tensor]:
        """Positions ``[3, t]`` of each frame's tokens; ``first``: position of the first token at time 0."""
        positions: list[Tensor] = []
        for grid, alike in itertools.groupby(frames, attrgetter("grid")):
            group = list(alike)
            counts = [len(frame.cells) for frame in group]
            cells, size = torch.cat([frame.cells for frame in group]), torch.tensor(counts)
            time = torch.tensor([frame.time_s for frame in group], dtype=torch.float64).repeat_interleave(size)
            slot = torch.tensor([frame.slot for frame in group]).repeat_interleave(size)
            found = self.token_positions(first, time.to(cells.device), slot.to(cells.device), cells, grid)
            # Cloned: a view would keep the positions of all frames alive.
            positions += [mine.clone() for mine in torch.split(found, counts, dim=1)]
        return positions

    @torch.no_grad()
    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``cos, sin [n, d]`` float32 for positions ``[3, n]`` (one-axis families read the first row).

        Angles are computed in float64: a day after the start, float32 ones are wrong in the second digit.
        """
        rope = self._text_model.rotary_emb
        frequency = getattr(rope, "original_inv_freq", rope.inv_freq).to(self.device, torch.float64)
        turned = to_device(positions, self.device).double().index_select(0, self.rotary_axes)
        angle = turned * frequency[:, None]
        scale = float(rope.attention_scaling)
        cos, sin = ((turned.T * scale).float() for turned in (angle.cos(), angle.sin()))
        return torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1)

    @cached_property
    def rotary_axes(self) -> Tensor:
        """Position axis of each rotary frequency ``[d / 2]``."""
        return torch.zeros(len(self._text_model.rotary_emb.inv_freq), dtype=torch.int64, device=self.device)

    # -- language model ---------------------------------------------------------------------------
    @cached_property
    def layers(self) -> Sequence[nn.Module]:
        return list(self._text_model.layers)

    @property
    def text_config(self) -> Any:
        """The language model's configuration (``num_hidden_layers, num_key_value_heads, hidden_size`` …)."""
        return self._text_model.config

    @property
    def deepstack(self) -> int:
        """Number of extra embeddings that visual tokens carry: layer ``i`` adds the ``i``-th to its output."""
        return 0

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[n]`` -> embeddings ``[n, W]``, ``W = (1 + deepstack) D``; the extra parts are zero for text."""
        embedded: Tensor = self._text_model.embed_tokens(to_device(ids, self.device))
        return F.pad(embedded, (0, self.deepstack * embedded.shape[1]))

    def use_float8(self) -> None:
        """Convert the linear layers of tower and decoder layers to float8 (see :mod:`cluster.models.float8`)."""
        towers = [part for name, part in self.model.model.named_children() if name != "language_model"]
        for part in (*towers, *self.layers):
            use_float8(part)

    @cached_property
    def _decoder(self) -> list[DecoderLayer]:
        return [DecoderLayer(layer) for layer in self.layers]

    def run_layer(self, index: int, hidden: Tensor, embeds: Tensor, *step: Any) -> Tensor:
        """Run layer ``index`` on ``hidden [n, D]``, rows whose input was ``embeds [n, W]``; ``step``: the other
        arguments of :class:`DecoderLayer`."""
        hidden = self._decoder[index](index, hidden, *step)
        if index < self.deepstack:
            width = hidden.shape[1]
            hidden = hidden + embeds[:, (1 + index) * width : (2 + index) * width]
        return hidden

    @cached_property
    def key_bias(self) -> Tensor | None:
        """``[L, Hkv, 1, d]`` float32, see :func:`~cluster.models.layers.key_bias`."""
        return key_bias(self.layers, head_size(self.text_config))

    @torch.no_grad()
    def projections(self, index: int, hidden: Tensor, rotary: Rotary | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`DecoderLayer.projections`, of layer ``index``."""
        return self._decoder[index].projections(hidden, rotary)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last layer ``[n, D]`` -> logits ``[n, vocab]`` (final norm and head applied)."""
        scores: Tensor = self.model.lm_head(self._text_model.norm(hidden))
        return scores

    # -- the reference --------------------------------------------------------------------------
    @abstractmethod
    def reference_logits(self, frames: Sequence[PatchBatch], times_s: Sequence[float], question: str) -> Tensor:
        """Logits ``[vocab]`` of transformers' own forward pass over a full window: the oracle of the test matrix."""

    def _library_logits(self, ids: Sequence[int], **inputs: Any) -> Tensor:
        """Logits ``[vocab]`` after these tokens, by transformers' own forward pass."""
        tokens = torch.tensor([ids], device=self.device)
        with self._library_attention():
            output = self.model(input_ids=tokens, use_cache=False, logits_to_keep=1, **inputs)
        logits: Tensor = output.logits[0, -1]
        return logits

    @contextmanager
    def _library_attention(self) -> Iterator[None]:
        """Context with transformers' own SDPA and without TF32, which cuDNN uses for convolutions by default."""
        configs = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        before = [(config, config._attn_implementation) for config in configs.values()]
        for config in configs.values():
            config._attn_implementation = "sdpa"
        try:
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                yield
        finally:
            for config, name in before:
                config._attn_implementation = name

    # -- sizes ----------------------------------------------------------------------------------
    @abstractmethod
    def tower_flops(self, frames: Sequence[PatchBatch]) -> int:
        """FLOPs of ``encode`` for these frames (multiply-add = 2)."""

    def llm_flops(self, computed: float, attended: float, omitted: tuple[float, float] = (0, 0)) -> int:
        """FLOPs of the decoder layers for ``computed`` tokens whose attention spans sum to ``attended``: linear layers
        and attention products, without norms, activations, rotary, and the output head, which only each question's last
        token passes through. ``omitted``: tokens that a layer only projects, and the sum of their spans."""
        config, weights, size = self.text_config, self._layer_weights, head_size(self.text_config)
        heads, projected = config.num_attention_heads, config.num_attention_heads + 2 * config.num_key_value_heads
        linear = computed * sum(weights) - omitted[0] * (weights[-1] - projected * size * config.hidden_size)
        flops: int = round(2 * linear + 4 * heads * size * (attended * len(weights) - omitted[1]))
        return flops

    @cached_property
    def _layer_weights(self) -> list[int]:
        return [*map(linear_weights, self.layers)]
