"""Positions: the full layout is the library's; a pruned token stands where it would have stood."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from cluster.lab.bench.faults.positions import RULES, SeenFrame, qwen2_5_vl
from cluster.models.base import FrameSpan
from cluster.types import PatchGrid


def spans_of(model, frames, period):
    return [
        FrameSpan(time_s=slot * period, slot=slot, cells=tokens.cells, grid=tokens.grid)
        for slot, tokens in enumerate(model.encode(frames))
    ]


def by_hand(rule, spans, first, question):
    seen = [
        SeenFrame(Fraction(s.time_s), s.grid.group_rows, s.grid.group_cols, [(r, c) for r, c in s.cells.tolist()])
        for s in spans
    ]
    return torch.tensor(rule(first, seen, question, 2)).T


def test_the_text_follows_the_largest_position_of_all_three_axes(qwen):
    """40 s at two tokens a second over 16x16 groups behind 20 tokens: time ends at 20 + 79, rows at 20 + 15."""
    grid = PatchGrid(32, 32, 14, 2, 2)
    cells = torch.ones(16, 16).nonzero()
    spans = [FrameSpan(time_s=slot / 2, slot=slot, cells=cells, grid=grid) for slot in range(80)]
    window = qwen.window_positions(20, spans)
    assert window.frames[-1].amax(1).tolist() == [99, 35, 35]
    assert window.next == 100
    assert qwen.window_positions(20, spans[:3]).next == 36


@pytest.mark.parametrize("size", [(160, 120), (90, 160), (112, 112)])
@pytest.mark.parametrize("period", [1.0, 0.5, 0.25, 4.0])
def test_qwen_full_window_is_the_published_rule(qwen, make_frame, size, period):
    grid = qwen.geometry.grid(*size)
    spans = spans_of(qwen, [make_frame(grid) for _ in range(5)], period)
    first, question = 7, 4
    window = qwen.window_positions(first, spans)
    before, after = torch.arange(first).expand(3, -1), torch.arange(window.next, window.next + question).expand(3, -1)
    ours = torch.cat([before, *window.frames, after], dim=1)
    assert torch.equal(ours, by_hand(qwen2_5_vl, spans, first, question))


@pytest.mark.parametrize("size", [(160, 120), (90, 160), (112, 112)])
@pytest.mark.parametrize("period", [1.0, 0.5, 0.25, 4.0])
def test_a_full_window_is_the_published_rule(model, make_frame, size, period):
    spans = spans_of(model, [make_frame(model.geometry.grid(*size)) for _ in range(5)], period)
    window = model.window_positions(7, spans)
    before, after = torch.arange(7).expand(3, -1), torch.arange(window.next, window.next + 4).expand(3, -1)
    assert torch.equal(torch.cat([before, *window.frames, after], dim=1), by_hand(RULES[model.family], spans, 7, 4))


def test_qwen2_counts_frames_and_not_seconds(qwen2):
    """Twenty frames of 4x3 groups behind 5 tokens, whatever the pace: the last at 5 + 19, the text after it."""
    grid, cells = PatchGrid(8, 6, 14, 2, 2), torch.ones(4, 3).nonzero()
    for period in (0.5, 7.0):
        window = qwen2.window_positions(5, [FrameSpan(slot * period, slot, cells, grid) for slot in range(20)])
        assert window.frames[-1].amax(1).tolist() == [24, 8, 7]
        assert window.next == 25


def test_qwen3_writes_the_streams_time_whatever_the_window(qwen3, make_frame):
    """The same number of tokens for every time, so that frames stand as in the prompt that is written out."""
    grid = qwen3.geometry.grid(160, 120)
    frames = [replace(make_frame(grid), time_s=time) for time in (0.0, 7.96, 1234.5, 8999.9, 9000.0)]
    read = []
    for tokens in qwen3.encode(frames):
        text = (tokens.cells[:, 0] < 0).nonzero().flatten()
        width = qwen3.text_config.hidden_size
        table = qwen3.model.model.language_model.embed_tokens.weight
        ids = torch.cdist(tokens.embeds[text, :width], table).argmin(1)
        read.append(qwen3.tokenizer.decode(ids))
        assert not tokens.embeds[text, width:].any()
        assert tokens.embeds[tokens.cells[:, 0] >= 0, width:].any()
    times = ("1000.0", "1008.0", "2234.5", "9999.9", "1000.0")
    assert read == [f"<{time} seconds><|vision_start|><|vision_end|>" for time in times]
    assert len({len(tokens) for tokens in qwen3.encode(frames)}) == 1


@pytest.mark.parametrize("fps", [Fraction(30000, 1001), Fraction(24000, 1001), Fraction(25, 2)])
def test_qwen_times_of_a_camera_are_rounded(qwen, fps):
    """Samples at 2 a second are the first pictures at or after each half second; two of them are one frame."""
    pictures = [math.ceil(second * fps) / fps for second in range(60)]
    grid, cells = PatchGrid(2, 2, 14, 2, 2), torch.zeros(1, 2, dtype=torch.int64)
    for opened in range(20):
        times = [round(float(time - pictures[opened]), 6) for time in pictures[opened : opened + 40]]
        spans = [FrameSpan(time_s=time, slot=slot, cells=cells, grid=grid) for slot, time in enumerate(times)]
        assert [int(frame[0, 0]) for frame in qwen.window_positions(0, spans).frames] == list(range(0, 80, 2))


def test_internvl_full_window_counts_up(internvl, make_frame):
    grid = internvl.geometry.grid(320, 180)
    window = internvl.window_positions(9, spans_of(internvl, [make_frame(grid) for _ in range(3)], 0.5))
    positions = torch.cat(window.frames, dim=1)
    assert torch.equal(positions, torch.arange(9, 9 + positions.shape[1]).expand(3, -1))
    assert window.next == 9 + positions.shape[1]


def test_a_pruned_token_keeps_its_place(model, make_frame, random_keep):
    grid = model.geometry.grid(160, 120)
    full = spans_of(model, [make_frame(grid) for _ in range(4)], 1.0)
    pruned = spans_of(model, [make_frame(grid, random_keep(grid, 0.4)) for _ in range(4)], 1.0)
    whole, part = model.window_positions(5, full), model.window_positions(5, pruned)
    assert part.next == whole.next
    for complete, all_positions, kept, positions in zip(full, whole.frames, pruned, part.frames, strict=True):
        place = {tuple(cell): all_positions[:, i] for i, cell in enumerate(complete.cells.tolist())}
        assert positions.shape == (3, len(kept.cells))
        assert positions.dtype == torch.int64
        for i, cell in enumerate(kept.cells.tolist()):
            assert torch.equal(positions[:, i], place[tuple(cell)])


def test_a_missing_frame_leaves_a_hole(model, make_frame):
    grid = model.geometry.grid(160, 120)
    spans = spans_of(model, [make_frame(grid) for _ in range(4)], 1.0)
    whole = model.window_positions(5, spans)
    holed = model.window_positions(5, [spans[0], spans[1], spans[3]])
    assert torch.equal(holed.frames[2], whole.frames[3])
    assert holed.next == whole.next


def test_sliding_a_window_shifts_it_as_one(model, make_frame):
    """Reused KV is valid because the frames of two windows differ by one constant offset per axis."""
    grid = model.geometry.grid(160, 120)
    spans = spans_of(model, [make_frame(grid) for _ in range(4)], 1.0)
    later = [FrameSpan(span.time_s - 1.0, span.slot - 1, span.cells, span.grid) for span in spans[1:]]
    shift = torch.cat(model.window_positions(5, spans).frames[1:], 1) - torch.cat(
        model.window_positions(5, later).frames, 1
    )
    assert torch.equal(shift, shift[:, :1].expand_as(shift))
    assert shift[0, 0] > 0


def test_qwen_time_survives_a_rounded_clock(qwen):
    grid = PatchGrid(2, 2, 14, 2, 2)
    cells = torch.zeros(1, 2, dtype=torch.int64)
    spans = [FrameSpan(time_s=time, slot=3, cells=cells, grid=grid) for time in (3.0, 2.999967, 3.000033)]
    assert {int(frame[0, 0]) for frame in qwen.window_positions(0, spans).frames} == {6}


def test_no_frames(model):
    window = model.window_positions(3, [])
    assert window.frames == []
    assert window.next == 3
