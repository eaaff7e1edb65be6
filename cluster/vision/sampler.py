"""Cuts the kept patches of sampled pictures into :class:`FrameSample` messages for the replica."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from cluster.types import (
    MICROSECONDS,
    BoolGrid,
    FrameSample,
    PatchGrid,
    PictureHeader,
    SampledPicture,
    UInt8Array,
)
from cluster.vision.pruners.base import PruneDecision, Pruner, any_in_group, expand_groups, keep_everything


def cut_patches(pictures: list[UInt8Array], groups: BoolGrid, grid: PatchGrid) -> UInt8Array:
    """Cut the patches of the set groups from ``T`` pictures, in group order (see :class:`FrameSample`).

    Args:
        pictures: ``T`` pictures ``[height, width, 3]`` uint8.
        groups: ``[group rows, group cols]`` bool.
        grid: the pictures' patch grid.

    Returns:
        ``[n, T, 3, p, p]`` uint8 with ``n = groups.sum() * merge**2``.
    """
    merge, patch = grid.merge, grid.patch
    count = int(np.count_nonzero(groups))
    patches = np.empty((count, merge, merge, len(pictures), 3, patch, patch), dtype=np.uint8)
    for t, picture in enumerate(pictures):
        cells = picture.reshape(grid.group_rows, merge, patch, grid.group_cols, merge, patch, 3)
        patches[:, :, :, t] = cells.transpose(0, 3, 1, 4, 6, 2, 5)[groups]
    return patches.reshape(count * merge**2, len(pictures), 3, patch, patch)


AnyPicture = TypeVar("AnyPicture", bound=PictureHeader)


Cut = Callable[[], UInt8Array]
"""Cuts the patches of a frame (see :func:`cut_patches`)."""


@dataclass(frozen=True, slots=True)
class FrameSelection:
    """A frame whose patches are still to be cut: ``groups`` of ``T`` pictures, on host or device."""

    frame: FrameSample
    pictures: list[Any]
    groups: BoolGrid

    def complete(self, patches: UInt8Array) -> FrameSample:
        """The frame with its patches (see :func:`cut_patches`)."""
        return replace(self.frame, patches=patches)

    def cut(self) -> UInt8Array:
        """Cut the patches of pictures on the host."""
        return cut_patches(self.pictures, self.groups, self.frame.grid)


@dataclass(slots=True)
class _Pending:
    """A sample waiting for the rest of its temporal patch; ``period``: microseconds until the next one."""

    frame: PictureHeader
    rgb: Any
    mask: BoolGrid
    activity: float
    period: float


class PatchSampler:
    """Combines ``T = grid.temporal`` consecutive samples of one camera into one :class:`FrameSample`.

    Pruning is per sample; the frame's mask is the union of its samples' masks, and a single anchor, gap or fresh sample
    marks the whole frame. A random access sample drops pending ones (counted in ``dropped``), since frames never span
    missing video. ``activity``: of the last sample fed (see :class:`PruneDecision`). Not thread-safe except for
    :meth:`force_anchor`.
    """

    def __init__(self, stream: str, pruner: Pruner, fps: float) -> None:
        """``stream``: the camera's name; ``fps``: sampling rate, which determines durations."""
        self.stream = stream
        self.pruner = pruner
        self.fps = fps
        self.dropped = 0
        self.activity = 0.0
        self._threshold: float | None = getattr(pruner, pruner.knob) if pruner.knob else None
        self._pending: list[_Pending] = []
        self._index = 0
        self._forced = False

    def force_anchor(self) -> None:
        """Make the next :class:`FrameSample` complete, as following a gap: its receiver has missed frames."""
        self._forced = True

    def reconfigure(self, *, prune: float, fps: float) -> None:
        """From the next sample on, scale the pruner's threshold by ``prune`` and sample at ``fps``. Keeps a pending
        sample: the pruner assumes that it is sent."""
        if self._threshold is not None:
            setattr(self.pruner, self.pruner.knob, self._threshold * prune)
        self.fps = fps

    def feed(self, frame: SampledPicture) -> FrameSample | None:
        """Add a sample; returns a frame for every ``T``-th."""
        return _cut(self.select(frame))

    def select(self, frame: SampledPicture) -> FrameSelection | None:
        """Like :meth:`feed`, but without cutting patches."""
        frame = self.prepare(frame)
        # Otherwise the pruner would measure repeated pictures as zero noise.
        repeated = frame.repeated and not frame.anchor
        decision = self.pruner.repeat(frame) if repeated else self.pruner.prune(frame)
        self.activity = decision.activity
        return self.add(frame, decision, frame.rgb)

    def shows_change(self, frame: SampledPicture) -> bool:
        """Whether the pruner would find change in a picture; leaves its state unchanged."""
        return copy.deepcopy(self.pruner).prune(frame).activity > 0

    def flush(self) -> FrameSample | None:
        """At the end of the stream, complete a pending frame by repeating its last picture, as the model's own
        processor does."""
        return _cut(self.flush_selection())

    def prepare(self, frame: AnyPicture) -> AnyPicture:
        """Prepare a sample for pruning: make it an anchor if forced, and drop pending samples it cannot follow."""
        if self._pending and (frame.random_access or frame.grid != self._pending[0].frame.grid):
            self.drop_waiting()
        if self._forced and not frame.anchor:
            # The camera's own video has no gap, so the pruner keeps its state: an anchor suffices.
            return replace(frame, anchor=True)
        return frame

    def drop_waiting(self) -> None:
        """Drop pending samples of an incomplete frame."""
        self.dropped += len(self._pending)
        self._pending.clear()

    def add(self, frame: PictureHeader, decision: PruneDecision, rgb: Any) -> FrameSelection | None:
        """Add a prepared and pruned sample with its picture ``rgb``; returns a selection for every ``T``-th."""
        self._pending.append(_Pending(frame, rgb, decision.mask, decision.activity, MICROSECONDS / self.fps))
        return self._unite() if len(self._pending) == frame.grid.temporal else None

    def flush_selection(self) -> FrameSelection | None:
        """Like :meth:`flush`, but without cutting patches."""
        if not self._pending:
            return None
        while len(self._pending) < self._pending[0].frame.grid.temporal:
            self._pending.append(self._pending[-1])
        return self._unite()

    def _unite(self) -> FrameSelection:
        parts = self._pending
        first = parts[0].frame
        forced = self._forced
        self._forced = False
        fresh = any(part.frame.fresh for part in parts)
        gap = not fresh and (forced or any(part.frame.gap for part in parts))
        anchor = fresh or gap or any(part.frame.anchor for part in parts)
        mask = keep_everything(first) if anchor else np.logical_or.reduce([part.mask for part in parts])
        if first.hidden is not None and not anchor:
            # Masked cells stay black and need no update. Anchors include them, as windows open where all cells are
            # present.
            mask = mask & ~first.hidden
        groups = any_in_group(mask, first.grid.merge)
        mask = expand_groups(groups, first.grid.merge)
        sample = FrameSample(
            stream=self.stream,
            index=self._index,
            pts=first.pts,
            duration=round(sum(part.period for part in parts)),
            anchor=anchor,
            fresh=fresh,
            grid=first.grid,
            mask=mask,
            patches=_NONE,
            # The receiver does not know what changed in the frames it missed.
            activity=1.0 if gap else max(part.activity for part in parts),
            gap=gap,
        )
        self._index += 1
        self._pending = []
        return FrameSelection(sample, [part.rgb for part in parts], groups)


_NONE: UInt8Array = np.empty((0, 0, 3, 0, 0), np.uint8)


def _cut(selection: FrameSelection | None) -> FrameSample | None:
    return None if selection is None else selection.complete(selection.cut())


_DIM = 0.35
_LINE = (64, 224, 140)


def overlay(picture: UInt8Array, mask: BoolGrid) -> UInt8Array:
    """Copy of ``picture`` ``[height, width, 3]`` with pruned cells dark and grey, and an outline around kept ones.

    ``mask`` ``[rows, cols]`` may be coarser than the picture by any factor.
    """
    height, width = picture.shape[:2]
    rows = np.arange(height) * mask.shape[0] // height
    cols = np.arange(width) * mask.shape[1] // width
    kept = mask[rows][:, cols]
    grey = picture.mean(axis=2, keepdims=True)
    dimmed = ((0.5 * picture + 0.5 * grey) * _DIM).astype(np.uint8)
    shown: UInt8Array = np.where(kept[..., None], picture, dimmed)
    shown[_border(kept)] = _LINE
    return shown


def _border(kept: BoolGrid) -> BoolGrid:
    """Kept pixels adjacent to a pruned one."""
    border = np.zeros_like(kept)
    down, across = kept[1:] != kept[:-1], kept[:, 1:] != kept[:, :-1]
    border[1:] |= down
    border[:-1] |= down
    border[:, 1:] |= across
    border[:, :-1] |= across
    return border & kept
