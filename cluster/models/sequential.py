"""Base of families with one-axis positions: every frame takes equally many positions, however much of it is kept."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.models.checkpoint import Checkpoint, linear_weights, normalise
from cluster.types import PatchGrid


class SequentialFrames(VisionLanguageModel):
    """A family with one-axis positions and square frames of a single sample each."""

    position_rule = "one axis, equally many per frame"
    moving_axes = (1, 1, 1)
    # Text before and after every frame.
    frame_brackets: ClassVar[tuple[str, str]] = ("", "")

    # Set by the family: all layers of the tower; the convolution that embeds patches, whose stride equals its kernel
    # size; the tower's tokens per frame besides its patches; the id of a visual token in transformers' input.
    _encoder_layers: Any
    _patch_projection: Any
    _class_tokens: int
    _placeholder: int

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._tower: Any = self.model.model.vision_tower

    @cached_property
    def _brackets(self) -> tuple[list[int], list[int]]:
        before, after = self.frame_brackets
        return self._ids(before), self._ids(after)

    def _frame_text(self, frame: PatchBatch) -> tuple[list[int], list[int]]:
        del frame
        return self._brackets

    # -- vision -----------------------------------------------------------------------------------
    @property
    def _depth(self) -> int:
        """Number of layers to run: feature 0 is the embedding, feature i the output of the i-th layer, -1 the last."""
        layer, layers = int(self.model.config.vision_feature_layer), len(self._encoder_layers)
        return layer if layer >= 0 else layers + 1 + layer

    def _embed_patches(self, patches: Tensor) -> Tensor:
        projection = self._patch_projection
        pixels = normalise(patches, self.mean, self.std, self.dtype).flatten(1)
        return F.linear(pixels, projection.weight.flatten(1), projection.bias)

    def _raster(self, cells: Tensor) -> Tensor:
        """Group cells ``[g, 2]`` -> raster index in the tile of each of their patches ``[g * merge**2]``."""
        assert self.geometry.square is not None
        row, col = self._patch_positions(cells).unbind(1)
        return row * (self.geometry.square // self.geometry.patch) + col

    # -- positions --------------------------------------------------------------------------------
    def frame_place(self, time_s: float, slot: int, grid: PatchGrid) -> int:
        """See the base; frames are placed by slot, whatever the time between them."""
        del time_s
        return slot * self._frame_length(grid)

    def next_position(self, first: int, place: int, grid: PatchGrid) -> int:
        return first + place + self._frame_length(grid)

    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """One axis, repeated three times: slot times unpruned frame length, plus the token's unpruned index."""
        del time_s
        row, col = cells.to(torch.int64).unbind(1)
        before = len(self._brackets[0])
        visual = before + row * grid.group_cols + col
        text = torch.where(col < before, col, col + grid.tokens)
        start = first + slot.to(torch.int64) * self._frame_length(grid)
        return (start + torch.where(row < 0, text, visual)).expand(3, -1)

    def _frame_length(self, grid: PatchGrid) -> int:
        before, after = self._brackets
        return len(before) + grid.tokens + len(after)

    # -- the reference ----------------------------------------------------------------------------
    @abstractmethod
    def _pixels(self, frames: Sequence[PatchBatch]) -> dict[str, Tensor]:
        """Complete frames as transformers' input."""

    @torch.no_grad()
    def reference_logits(self, frames: Sequence[PatchBatch], times_s: Sequence[float], question: str) -> Tensor:
        """See the base. Frames are in consecutive slots; times only order them. Raises ``ValueError``: a frame is
        pruned, or times do not ascend."""
        if list(times_s) != sorted(times_s) or len(times_s) != len(frames):
            raise ValueError("the reference needs one time per frame, ascending")
        if any(len(frame.cells) != frame.grid.tokens for frame in frames):
            raise ValueError("the reference needs complete frames")
        before, after = self._brackets
        ids = self.system_ids()
        for frame in frames:
            ids += [*before, *[self._placeholder] * frame.grid.tokens, *after]
        return self._library_logits([*ids, *self.question_ids(question)], **self._pixels(frames))

    def _picture(self, frame: PatchBatch) -> Tensor:
        """A complete frame's patches in group order -> normalised pixels ``[C, height, width]``."""
        grid, merge = frame.grid, self.geometry.merge
        pixels = normalise(frame.patches.to(self.device), self.mean, self.std, self.dtype)[:, 0]
        tiles = pixels.view(grid.group_rows, grid.group_cols, merge, merge, -1, grid.patch, grid.patch)
        return tiles.permute(4, 0, 2, 5, 1, 3, 6).reshape(-1, grid.height, grid.width)

    # -- sizes ------------------------------------------------------------------------------------
    def tower_flops(self, frames: Sequence[PatchBatch]) -> int:
        """See the base: linear layers and attention products for kept patches and class tokens."""
        counts = [count for count in self._tower_patches(frames) if count]
        patches, extra = sum(counts), self._class_tokens
        embedding, layers, projector, width = self._tower_weights
        return int(
            2 * patches * embedding
            + 2 * (patches + extra * len(counts)) * layers
            + 2 * self._projected(patches) * projector
            + 4 * width * sum((extra + count) ** 2 for count in counts)
        )

    @cached_property
    def _tower_weights(self) -> tuple[int, int, int, int]:
        """Number of weights in patch embedding, layers and projector, and the sum of the layers' widths."""
        layers = sum(linear_weights(layer) for layer in self._encoder_layers[: self._depth])
        projector = linear_weights(self.model.model.multi_modal_projector)
        return self._patch_projection.weight.numel(), layers, projector, self._depth * self._tower.config.hidden_size

    def _projected(self, patches: int) -> int:
        """Rows that pass through the projector for this many patches: by default one per group."""
        return patches // self.geometry.merge**2

    def _tower_patches(self, frames: Sequence[PatchBatch]) -> list[int]:
        """Patches of each frame that pass through the tower."""
        return [len(frame.patches) for frame in frames]
