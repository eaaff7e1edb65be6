"""What an engine needs of a vision-language model family. One family, one file, one registry entry.

A family wraps a transformers checkpoint class. The checkpoint, its linear layers and its loading stay the library's;
a family only says how patches are packed through the tower, which tokens stand around a frame, which positions
tokens have, and how keys are rotated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cluster.errors import ModelError
from cluster.models.checkpoint import INSTRUCTION, PATCHES_PER_PASS, SYSTEM_PROMPT, Checkpoint, linear_weights
from cluster.models.settings import ModelSettings
from cluster.types import PatchGeometry, PatchGrid

_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """Kept patches of one frame, ready for the tower.

    * ``patches`` ``[n, T, C, p, p]`` uint8 in group order (see ``FrameSample``)
    * ``cells`` ``[n / merge**2, 2]`` int64: (row, col) of each group on the merged grid, row-major
    """

    patches: Tensor
    cells: Tensor
    grid: PatchGrid


@dataclass(frozen=True, slots=True)
class FrameTokens:
    """One frame as the language model sees it: visual tokens and any text around them.

    * ``embeds`` ``[t, D]``
    * ``cells`` ``[t, 2]`` int64, (row, col) on the merged grid; (-1, k) for the k-th text token of the frame
    """

    embeds: Tensor
    cells: Tensor
    grid: PatchGrid

    def __len__(self) -> int:
        return int(self.embeds.shape[0])


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """A frame's place in a window, enough to position its tokens: seconds since the window's first frame, its slot
    (how many frame periods since then), and its cells."""

    time_s: float
    slot: int
    cells: Tensor
    grid: PatchGrid


@dataclass(frozen=True, slots=True)
class WindowPositions:
    """Positions of one window: ``frames[i]`` is ``[3, t_i]`` int64; the first question token stands at ``next``."""

    frames: list[Tensor]
    next: int


class VisionLanguageModel(ABC):
    """A transformers checkpoint of one family, on one device, in evaluation mode, without gradients.

    Everything but vision, prompt and positions is the same in all families. ``random_weights``: nothing was trained, so
    answers mean nothing (presets). ``settings``: of its ``sightline.json``.
    """

    family: ClassVar[str]
    # Special tokens its prompt is made of: a tokenizer that would spell them out letter by letter is refused.
    prompt_tokens: ClassVar[tuple[str, ...]]
    # What its prompt has before the first frame and behind the last.
    video_brackets: ClassVar[tuple[str, str]] = ("", "")
    # Of pixels (RGB), where the checkpoint has no image processor.
    pixel_mean: ClassVar[tuple[float, ...]]
    pixel_std: ClassVar[tuple[float, ...]]

    # Its parts have types only at run time.
    model: Any
    tokenizer: Any
    geometry: PatchGeometry
    device: torch.device
    dtype: torch.dtype
    random_weights: bool
    settings: ModelSettings

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = checkpoint.model
        self.tokenizer = checkpoint.tokenizer
        self.device = checkpoint.device
        self.dtype = checkpoint.dtype
        self.random_weights = checkpoint.random_weights
        self.settings = checkpoint.settings
        self.mean, self.std = checkpoint.mean or self.pixel_mean, checkpoint.std or self.pixel_std
        self.geometry = self._geometry(checkpoint)
        for token in self.prompt_tokens:
            self._require(token)
        self.yes_no_ids()

    # -- what a family adds -----------------------------------------------------------------------
    @abstractmethod
    def _geometry(self, checkpoint: Checkpoint) -> PatchGeometry:
        """Patch size, merge and temporal patch of the checkpoint.

        Raises:
            ModelError: a shape the pruned tower cannot serve.
        """

    @property
    def _text_model(self) -> Any:
        return self.model.model.language_model

    @classmethod
    @abstractmethod
    def untrained(cls, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any]:
        """A transformers model with these entries of its text and vision configuration, and a small tokenizer."""

    @abstractmethod
    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """Run frames that each keep something through the tower: their visual tokens ``[t, D]``, in order of cells."""

    def _frame_tokens(self, frame: PatchBatch, visual: Tensor) -> FrameTokens:
        """Visual tokens ``[t, D]`` and whatever text the family writes around a frame."""
        return FrameTokens(embeds=visual, cells=frame.cells, grid=frame.grid)

    # -- vision -----------------------------------------------------------------------------------
    @torch.no_grad()
    def encode(self, frames: Sequence[PatchBatch]) -> list[FrameTokens]:
        """Run the kept patches of many frames (of any streams) through the tower in packed calls.

        Frames never attend to each other. With every patch kept it equals the transformers tower. A frame with no
        patch gives a ``FrameTokens`` of length 0 (no text around it either).
        """
        kept = [frame for frame in frames if len(frame.cells)]
        visual = iter([tokens for part in self._parts(kept) for tokens in self._encode_kept(part)])
        nothing = torch.zeros(0, self.text_config.hidden_size, dtype=self.dtype, device=self.device)
        return [
            self._frame_tokens(frame, next(visual))
            if len(frame.cells)
            else FrameTokens(embeds=nothing, cells=frame.cells, grid=frame.grid)
            for frame in frames
        ]

    def _parts(self, frames: Sequence[PatchBatch]) -> list[list[PatchBatch]]:
        limit = PATCHES_PER_PASS.get(self.device.type, PATCHES_PER_PASS["cuda"])
        parts: list[list[PatchBatch]] = []
        room = 0
        for frame in frames:
            count = len(frame.patches)
            if count > room:
                parts.append([])
                room = limit
            parts[-1].append(frame)
            room -= count
        return parts

    def _patch_positions(self, cells: Tensor) -> Tensor:
        """Group cells ``[g, 2]`` -> (row, col) of each of their patches ``[g * merge**2, 2]``."""
        merge = self.geometry.merge
        inner = torch.cartesian_prod(*[torch.arange(merge, device=cells.device)] * 2)
        return (cells[:, None] * merge + inner).flatten(0, 1)

    # -- text -----------------------------------------------------------------------------------
    def system_ids(self) -> list[int]:
        """Token ids before the first frame; the same for every stream, so its KV is computed once and shared."""
        before = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
        return self._ids(before + self.video_brackets[0])

    def question_ids(self, text: str) -> list[int]:
        """Token ids from the end of the last frame to where the answer's first token is predicted."""
        return self._prompt_ids(self.video_brackets[1], text, f"{INSTRUCTION}{_ANSWER}")

    def ask_ids(self, text: str, *, follow_up: bool = False) -> list[int]:
        """Like :meth:`question_ids`, for a free question about the past; ``follow_up``: after the last answer's tokens
        instead of the last frame. What the checkpoint was trained with follows it, by default nothing."""
        before = "<|im_end|>\n<|im_start|>user\n" if follow_up else self.video_brackets[1]
        return self._prompt_ids(before, text, f"{self.settings.open_instruction or ''}{_ANSWER}")

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt_ids(self, before: str, text: str, after: str) -> list[int]:
        """Ids of a template around somebody's ``text``, in which special tokens are letters like any others.

        A text that spells none is tokenized together with the template, as the checkpoint was trained.
        """
        together, around = self._ids(before + text + after), [*self._ids(before), *self._ids(after)]
        if self._special_among(together) == self._special_among(around):
            return together
        return [*self._ids(before), *self.text_ids(text), *self._ids(after)]

    def text_ids(self, text: str) -> list[int]:
        """Token ids of somebody's words alone, of which none is a special token whatever the words are; the other
        methods treat the text they are given alike."""
        plain = list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if not self._special_among(plain):
            return plain
        # Tokens such as <tool_call>, which a tokenizer cuts out although it does not call them special.
        return [token for letter in text for token in self._ids(letter)]

    def _special_among(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._special]

    @cached_property
    def _special(self) -> frozenset[int]:
        """Ids that mean something to the model which a text must not say: special tokens and others in brackets."""
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
                f"the tokenizer of {self.model.name_or_path or self.family} has no token {token!r} the model knows; "
                "put the tokenizer the checkpoint came with beside its weights"
            )

    def yes_no_ids(self) -> tuple[list[int], list[int]]:
        """Token ids that count as yes and as no at the answer's first token (case and space variants)."""
        yes, no = self._first_ids(("yes", "Yes", "YES")), self._first_ids(("no", "No", "NO"))
        # A first token that both answers share tells nothing.
        shared = yes & no
        if not yes - shared or not no - shared:
            raise ModelError(f"the tokenizer of {self.family} cannot tell yes from no by the answer's first token")
        return sorted(yes - shared), sorted(no - shared)

    def _first_ids(self, words: Sequence[str]) -> set[int]:
        """Tokens that are one of the words; only if there are none, tokens that begin one ("Y" also begins "You")."""
        spelled = [self._ids(variant) for word in words for variant in (word, f" {word}")]
        return {ids[0] for ids in spelled if len(ids) == 1} or {self._ids(word)[0] for word in words}

    # -- positions ------------------------------------------------------------------------------
    @abstractmethod
    def window_positions(self, first: int, frames: Sequence[FrameSpan]) -> WindowPositions:
        """Positions of a window's tokens as the full, unpruned layout would give them; ``first`` follows the system
        prompt. A pruned token leaves a hole: what is kept stands where it would have stood."""

    @abstractmethod
    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """Positions ``[3, n]`` of single tokens of frames at ``time_s`` ``[n]`` float64 and ``slot`` ``[n]``, in cells
        ``[n, 2]``: what :meth:`window_positions` gives them in their frames."""

    @abstractmethod
    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``cos, sin [n, d]`` in float32 for positions ``[3, n]`` (1-D families read the first row)."""

    # -- language model ---------------------------------------------------------------------------
    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, in order, whose ``self_attn`` calls the registered attention function."""
        return list(self._text_model.layers)

    @property
    def text_config(self) -> Any:
        """The language model's configuration (``num_hidden_layers, num_key_value_heads, hidden_size`` …)."""
        return self._text_model.config

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[n]`` -> embeddings ``[n, D]``."""
        embedded: Tensor = self._text_model.embed_tokens(ids.to(self.device))
        return embedded

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last layer ``[n, D]`` -> logits ``[n, vocab]`` (final norm and head applied)."""
        scores: Tensor = self.model.lm_head(self._text_model.norm(hidden))
        return scores

    # -- the reference --------------------------------------------------------------------------
    @abstractmethod
    def reference_logits(self, frames: Sequence[PatchBatch], times_s: Sequence[float], question: str) -> Tensor:
        """Logits ``[vocab]`` of transformers' own forward over a full window: the oracle of the test matrix."""

    @contextmanager
    def _library_attention(self) -> Iterator[None]:
        """Run transformers' own SDPA everywhere, whatever attention function an engine has set."""
        configs = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        before = [(config, config._attn_implementation) for config in configs.values()]
        for config in configs.values():
            config._attn_implementation = "sdpa"
        try:
            yield
        finally:
            for config, name in before:
                config._attn_implementation = name

    # -- sizes ----------------------------------------------------------------------------------
    @abstractmethod
    def tower_flops(self, frames: Sequence[PatchBatch | int]) -> int:
        """Floating-point operations of ``encode`` for frames with these patch counts (multiply-add = 2)."""

    def llm_flops(self, computed: int, attended: int) -> int:
        """FLOPs of the decoder layers for ``computed`` tokens whose attention spans sum to ``attended``.

        Linear layers and the two attention products; norms, activations and rotary are left out, and so is the output
        head, which only the last token of each question passes.
        """
        config = self.text_config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_pair = 4 * config.num_attention_heads * head * config.num_hidden_layers
        return int(2 * computed * self._layer_weights + per_pair * attended)

    @cached_property
    def _layer_weights(self) -> int:
        return sum(linear_weights(layer) for layer in self.layers)


def patch_counts(frames: Sequence[PatchBatch | int]) -> list[int]:
    """Kept patches of each frame."""
    return [f if isinstance(f, int) else int(f.patches.shape[0]) for f in frames]
