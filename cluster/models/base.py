"""What the native engine needs of a vision-language model family. One family, one file, one registry entry.

A family wraps a transformers checkpoint class. The checkpoint, its linear layers and its loading stay the library's;
a family only says how patches are packed through the tower, which tokens stand around a frame, which positions
tokens have, and how keys are rotated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cluster.models.settings import ModelSettings
from cluster.types import PatchGeometry, PatchGrid


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
    """A loaded model of one family, on one device, in evaluation mode, without gradients.

    ``random_weights``: nothing was trained, so answers mean nothing (presets). ``settings``: of its ``sightline.json``.
    """

    family: ClassVar[str]

    model: nn.Module
    tokenizer: Any
    geometry: PatchGeometry
    device: torch.device
    dtype: torch.dtype
    random_weights: bool
    settings: ModelSettings

    # -- vision ---------------------------------------------------------------------------------
    @abstractmethod
    def encode(self, frames: Sequence[PatchBatch]) -> list[FrameTokens]:
        """Run the kept patches of many frames (of any streams) through the tower in one packed call.

        Frames never attend to each other. With every patch kept it equals the transformers tower. A frame with no
        patch gives a ``FrameTokens`` of length 0 (no text around it either).
        """

    # -- text -----------------------------------------------------------------------------------
    @abstractmethod
    def system_ids(self) -> list[int]:
        """Token ids before the first frame; the same for every stream, so its KV is computed once and shared."""

    @abstractmethod
    def question_ids(self, text: str) -> list[int]:
        """Token ids from the end of the last frame to where the answer's first token is predicted."""

    @abstractmethod
    def ask_ids(self, text: str, *, follow_up: bool = False) -> list[int]:
        """Like :meth:`question_ids`, for a free question about the past; ``follow_up``: after the last answer's tokens
        instead of the last frame."""

    @abstractmethod
    def text_ids(self, text: str) -> list[int]:
        """Token ids of somebody's words alone, of which none is a special token whatever the words are; the other
        methods treat the text they are given alike."""

    @abstractmethod
    def yes_no_ids(self) -> tuple[list[int], list[int]]:
        """Token ids that count as yes and as no at the answer's first token (case and space variants)."""

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

    # -- language model -------------------------------------------------------------------------
    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, in order, whose ``self_attn`` calls the registered attention function."""

    @property
    @abstractmethod
    def text_config(self) -> Any:
        """The language model's configuration (``num_hidden_layers, num_key_value_heads, hidden_size`` …)."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[n]`` -> embeddings ``[n, D]``."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last layer ``[n, D]`` -> logits ``[n, vocab]`` (final norm and head applied)."""

    # -- the reference --------------------------------------------------------------------------
    @abstractmethod
    def reference_logits(self, frames: Sequence[PatchBatch], times_s: Sequence[float], question: str) -> Tensor:
        """Logits ``[vocab]`` of transformers' own forward over a full window: the oracle of the test matrix."""

    # -- sizes ----------------------------------------------------------------------------------
    @abstractmethod
    def tower_flops(self, frames: Sequence[PatchBatch | int]) -> int:
        """Floating-point operations of ``encode`` for frames with these patch counts (multiply-add = 2)."""

    @abstractmethod
    def llm_flops(self, computed: int, attended: int) -> int:
        """FLOPs of the language model for ``computed`` tokens whose attention spans sum to ``attended``."""
