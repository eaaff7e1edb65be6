"""Positions and attention masks of a training sequence, equivalent to those of the engine's windows.

One sequence covers many windows. Visual tokens follow the system prompt in time order; each attends to the tokens
before it, back to the opening frame of the window that computed it. Questions branch off at many instants, each
attending to the system prompt, the frames of its window and itself. Only relative positions matter, so a question about
a window that opens at frame ``o`` is shifted forward by ``o``'s time instead of shifting the frames back (as
:func:`cluster.engine.native.plan.plan_window` does).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from cluster.engine.window.planner import IntArray
from cluster.models.base import FrameSpan, VisionLanguageModel

# Rows of a full block.
BLOCK_ROWS = 192


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Query rows ``[start, stop)`` and the row ranges of their keys; ``bias [stop - start, keys]``: 0 or minus
    infinity, with keys in the order of the ranges."""

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SequenceQuestion:
    """A question about frames ``[opening, end)``: its token ids, and those of the answer to learn (may be empty)."""

    opening: int
    end: int
    question: Sequence[int]
    answer: Sequence[int] = ()

    @property
    def ids(self) -> list[int]:
        return [*self.question, *self.answer]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLayout:
    """Rows of one sequence: system prompt, visual tokens, questions grouped by window.

    * ``positions`` ``[3, rows]``
    * ``system`` and ``text``: token ids of the rows before and after the visual ones
    * ``offsets`` ``[frames + 1]``: number of visual rows before each frame
    * ``asks``: questions in layout order; ``starts``: first row of each; ``order``: their original indices
    """

    positions: Tensor
    system: list[int]
    text: list[int]
    offsets: IntArray
    asks: tuple[SequenceQuestion, ...]
    starts: tuple[int, ...]
    blocks: tuple[Block, ...]
    order: tuple[int, ...]

    @property
    def visual(self) -> int:
        """Number of visual rows."""
        return int(self.offsets[-1])

    def __len__(self) -> int:
        return len(self.system) + self.visual + len(self.text)


def lay_out_sequence(
    model: VisionLanguageModel, frames: Sequence[FrameSpan], context: IntArray, asks: Sequence[SequenceQuestion]
) -> SequenceLayout:
    """Lay out one sequence.

    ``frames``: with the cells of their kept tokens; ``context`` ``[visual tokens]``: first frame each token attends to
    (the opening of the window that computed it). Raises ``ValueError``: a context or window outside the frames, or a
    context after its token.
    """
    counts = [len(frame.cells) for frame in frames]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    frame_of = np.repeat(np.arange(len(frames)), counts)
    if len(context) != len(frame_of) or (context < 0).any() or (context > frame_of).any():
        raise ValueError("every visual token needs a context that starts at or before its frame")
    if any(not 0 <= ask.opening < ask.end <= len(frames) for ask in asks):
        raise ValueError(f"a question's window lies outside the {len(frames)} frames")
    system = model.system_ids()
    head = len(system)
    order = sorted(range(len(asks)), key=lambda i: (asks[i].end, asks[i].opening))
    ordered = [asks[i] for i in order]
    positions, starts = _positions(model, head, frames, ordered)
    prompt = Block(0, head, ((0, head),), _bias(torch.ones(head, head, dtype=torch.bool).tril()))
    blocks = [prompt, *_visual_blocks(head, offsets, context)]
    row = head + int(offsets[-1])
    for (opening, end), group in groupby(ordered, key=lambda ask: (ask.opening, ask.end)):
        lengths = [len(ask.ids) for ask in group]
        window = (head + int(offsets[opening]), head + int(offsets[end]))
        blocks.append(_question_block(head, window, row, lengths))
        row += sum(lengths)
    text = [token for ask in ordered for token in ask.ids]
    return SequenceLayout(positions, system, text, offsets, tuple(ordered), tuple(starts), tuple(blocks), tuple(order))


def _positions(
    model: VisionLanguageModel, head: int, frames: Sequence[FrameSpan], asks: Sequence[SequenceQuestion]
) -> tuple[Tensor, list[int]]:
    parts = [torch.arange(head).expand(3, -1), *model.window_positions(head, _spans(frames)).frames]
    row = head + sum(len(frame.cells) for frame in frames)
    starts = []
    for ask in asks:
        count = len(ask.ids)
        # Same distance to its frames as if the window were alone.
        own = _spans(frames[ask.opening : ask.end])
        following = model.window_positions(head, own).next
        before = _corner(model, head, _spans(frames[: ask.opening + 1])[-1]) - _corner(model, head, own[0])
        parts.append(torch.arange(following, following + count).expand(3, -1) + before)
        starts.append(row)
        row += count
    return torch.cat(parts, dim=1), starts


def _spans(frames: Sequence[FrameSpan]) -> list[FrameSpan]:
    """The frames re-based as a window that opens with the first one."""
    opened = frames[0].time_s
    return [FrameSpan(frame.time_s - opened, slot, frame.cells, frame.grid) for slot, frame in enumerate(frames)]


def _corner(model: VisionLanguageModel, head: int, span: FrameSpan) -> Tensor:
    """Position ``[3, 1]`` of a frame's first cell, kept or not."""
    time, slot = torch.tensor([span.time_s], dtype=torch.float64), torch.tensor([span.slot])
    return model.token_positions(head, time, slot, torch.zeros(1, 2, dtype=torch.int64), span.grid)


def _bias(sees: Tensor) -> Tensor:
    return torch.zeros(sees.shape).masked_fill_(~sees, float("-inf"))


def _visual_blocks(head: int, offsets: IntArray, context: IntArray) -> list[Block]:
    """Rows attend to the system prompt and causally to the rows from their context on.

    Block and key starts are multiples of ``BLOCK_ROWS``, so that shapes recur.
    """
    blocks = []
    first_seen = torch.from_numpy(offsets[context])
    visual = int(offsets[-1])
    for start in range(0, visual, BLOCK_ROWS):
        stop = min(visual, start + BLOCK_ROWS)
        low = int(first_seen[start:stop].min()) // BLOCK_ROWS * BLOCK_ROWS
        key = torch.arange(low, stop)
        row = torch.arange(start, stop)
        sees = (key >= first_seen[start:stop, None]) & (key <= row[:, None])
        bias = _bias(torch.cat([torch.ones(stop - start, head, dtype=torch.bool), sees], dim=1))
        blocks.append(Block(head + start, head + stop, ((0, head), (head + low, head + stop)), bias))
    return blocks


def _question_block(head: int, window: tuple[int, int], row: int, lengths: Sequence[int]) -> Block:
    count = sum(lengths)
    own = torch.block_diag(*[torch.ones(n, n).tril() for n in lengths]).bool()  # type: ignore[no-untyped-call]
    sees = torch.cat([torch.ones(count, head + window[1] - window[0], dtype=torch.bool), own], dim=1)
    return Block(row, row + count, ((0, head), window, (row, row + count)), _bias(sees))
