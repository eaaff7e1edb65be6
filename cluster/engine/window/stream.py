"""State of one stream: the frames of its windows, their KV, and the last answers."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch

from cluster.engine.window.host_copies import HostCopy
from cluster.engine.window.kv import StreamKV
from cluster.engine.window.planner import BoolArray, IntArray
from cluster.engine.window.windows import WindowClock, WindowSpan, covered_until, opening_index, window_time
from cluster.memory.frame_retrieval import FrameReads
from cluster.memory.head_memory import KVChunk, KVSink
from cluster.models.base import FrameSpan, FrameTokens
from cluster.models.upload import to_device
from cluster.types import (
    MICROSECONDS,
    Answer,
    BoolGrid,
    FrameSample,
    PatchGrid,
    Question,
    StreamSpec,
    UInt8Array,
    WindowRequest,
)

log = logging.getLogger(__name__)

INVALID = -1
"""Stands for the window of a token whose KV is unusable."""
_ZERO = np.zeros(1, np.int64)


@dataclass(slots=True, eq=False)
class StreamFrame:
    """One frame: patches until it is encoded, then embeddings, and KV once a window has computed it.

    * ``size``: visual tokens (0: fully pruned; it takes up time but no slots)
    * ``time_s``, ``slot``: time and frame number since the stream's last (fresh) start
    * ``patches``: uint8 as in ``FrameSample``, ``None`` once encoded
    * ``moved``: the copy that moved its embeddings to host memory; see :func:`embeddings`
    * ``first``: index of its first token among all tokens of the stream that ever got KV
    * ``positions`` ``[3, t]`` int64: of its ``tokens``, in the stream's own time
    * ``computed`` ``[2, t]``, ``None`` without KV: per token, the window it was last computed in and the index of that
      window's first token
    * ``content``: digest of ``tokens``; "" until needed
    * ``window_time``: see :func:`~cluster.engine.window.windows.window_time`
    * ``memory_time``: microseconds on the memory's clock; ``pts`` without a memory
    """

    index: int
    pts: int
    duration: int
    anchor: bool
    complete: bool
    activity: float
    grid: PatchGrid
    mask: BoolGrid
    size: int
    patches: UInt8Array | None
    time_s: float = 0.0
    slot: int = 0
    tokens: FrameTokens | None = None
    moved: HostCopy | None = None
    first: int = 0
    positions: torch.Tensor | None = None
    computed: IntArray | None = None
    content: str = ""
    memory_time: int = 0
    window_time: int = field(init=False)

    @classmethod
    def of(cls, sample: FrameSample, *, time_s: float = 0.0, slot: int = 0) -> Self:
        return cls(
            index=sample.index,
            pts=sample.pts,
            duration=sample.duration,
            anchor=sample.anchor,
            complete=sample.complete,
            activity=sample.activity,
            grid=sample.grid,
            mask=sample.mask.copy(),
            size=sample.tokens,
            patches=_owned(sample.patches),
            time_s=time_s,
            slot=slot,
            memory_time=sample.pts,
        )

    def __post_init__(self) -> None:
        self.window_time = window_time(self)

    @property
    def moving(self) -> bool:
        """Whether anything changed in this frame, anchor or not."""
        return self.activity > 0

    @property
    def has_kv(self) -> bool:
        return self.computed is not None

    @property
    def nbytes(self) -> int:
        encoded = () if self.tokens is None else (self.tokens.embeds, self.tokens.cells)
        held = (self.mask, self.patches, self.positions, self.computed, *encoded)
        return sum(each.nbytes for each in held if each is not None)


@dataclass(frozen=True, slots=True)
class LastWindow:
    """The last computed window, its questions and answers."""

    window: int
    end: int
    questions: tuple[Question, ...]
    answers: tuple[Answer, ...]


@dataclass(slots=True)
class WindowProgress:
    """Work done so far on a window that has not been answered yet.

    * ``window``: its number; ``opening``: pts of its first frame
    * ``overlap``: tokens with KV from earlier windows; ``refreshed``: of them, recomputed ones (mean over layers)
    * ``rows``, ``attended``, ``omitted``, ``reads``: as in ``WindowStats``
    """

    window: int
    opening: int
    overlap: int = 0
    refreshed: float = 0.0
    rows: float = 0.0
    attended: float = 0.0
    omitted: tuple[float, float] = (0, 0)
    reads: FrameReads = field(default_factory=FrameReads)


@dataclass(slots=True, eq=False)
class Stream:
    """One stream. ``frames`` ascend in pts; those with KV come first, and their slots in ``kv`` are in this order."""

    spec: StreamSpec
    kv: StreamKV
    clock: WindowClock
    frames: list[StreamFrame] = field(default_factory=list)
    outstanding: list[WindowSpan] = field(default_factory=list)
    last: LastWindow | None = None
    # Windows computed since the last (fresh) start.
    windows_since_fresh: int = 0
    # Among all tokens that ever got KV: index of the next one.
    next_token: int = 0
    # Window time of the newest dropped frame with motion.
    last_motion_dropped: int | None = None
    newest: int | None = None
    # The stream's own time: pts of the first frame since the last (fresh) start, and frames since then.
    epoch: int = 0
    seen: int = 0
    progress: WindowProgress | None = None
    # Window whose prefill ahead failed: the rest is left to its step.
    failed_ahead: int | None = None
    # Visual tokens received since the current window was last worked on.
    waiting_rows: int = 0
    # Visual tokens encoded since the last computed window, and the tower's FLOPs for them.
    encoded: int = 0
    tower_flops: int = 0
    # Receives the KV of frames that leave the window; called with the stream's name for each frame lost on the way.
    kv_sink: KVSink | None = None
    kv_lost: Callable[[str], None] | None = None
    kv_failed: bool = False
    # Host memory occupied by embeddings moved there.
    moved_nbytes: int = 0
    restored: bool = False  # from a saved state, with no frame received since

    # -- frames in ------------------------------------------------------------------------------------
    def push(self, sample: FrameSample, arrived_s: float) -> list[WindowRequest]:
        """See ``Engine.push``."""
        if self.newest is None or sample.fresh or (sample.gap and not self._follows(sample)):
            self.reset()
            self.clock.restart(sample.pts)
            self.epoch, self.seen = sample.pts, 0
        elif sample.pts <= self.newest:
            raise ValueError(
                f"frame {sample.index} of {self.spec.stream} has pts {sample.pts}, not after {self.newest}; "
                "send frames in order, or mark the first one of a restarted clock as fresh"
            )
        frame = StreamFrame.of(sample, time_s=(sample.pts - self.epoch) / MICROSECONDS, slot=self.seen)
        self.seen += 1
        # Windows over restored frames that ended in the gap may have been answered before their engine was lost.
        known = self.frames and not (self.restored and sample.gap)
        self.restored = False
        closed = self.clock.close(frame.window_time, covered_until(self.frames[-1]) if known else None)
        self.frames.append(frame)
        self.newest = frame.pts
        until = frame.window_time + frame.duration
        closed += self.clock.close(until, until)
        return self._request(closed, arrived_s)

    def _follows(self, sample: FrameSample) -> bool:
        """Whether the window continues with this frame after a gap: not if the clock went back or the grid changed,
        as happens when another decoder has set the camera up again."""
        assert self.newest is not None
        return sample.pts > self.newest and (not self.frames or sample.grid == self.frames[-1].grid)

    def flush(self, arrived_s: float) -> list[WindowRequest]:
        """See ``Engine.flush``; the window ends with its last frame."""
        if not self.frames or (self.frames[-1].window_time < self.clock.end - self.clock.stride):
            return []
        frame = self.frames[-1]
        span = WindowSpan(self.clock.number, self.clock.start, frame.pts + frame.duration)
        self.clock.number += 1
        self.clock.end += self.clock.stride
        return self._request([span], arrived_s)

    def _request(self, closed: list[WindowSpan], arrived_s: float) -> list[WindowRequest]:
        self.outstanding.extend(closed)
        # To bound memory, windows expire one window length behind the newest.
        while self.outstanding and self.outstanding[0].end <= self.outstanding[-1].end - self.clock.window:
            del self.outstanding[0]
        self.drop_expired_frames()
        return [WindowRequest(self.spec.stream, s.number, s.start, s.end, arrived_s) for s in closed]

    # -- windows --------------------------------------------------------------------------------------
    def claim_window(self, request: WindowRequest) -> bool:
        """Claim a window for answering and expire all earlier ones; False if it has expired itself."""
        while self.outstanding and self.outstanding[0].number < request.window:
            del self.outstanding[0]
        if self.outstanding and self.outstanding[0].number == request.window:
            del self.outstanding[0]
            return True
        return False

    def window_frames(self, start: int, end: int) -> list[StreamFrame]:
        """Frames of a window, starting at its opening frame."""
        first = opening_index(self.frames, start)
        return [frame for frame in self.frames[first:] if frame.window_time < end]

    def progress_of(self, window: int, opening: int) -> WindowProgress | None:
        """Progress of this window, if work on it has begun."""
        progress = self.progress
        return progress if progress is not None and (progress.window, progress.opening) == (window, opening) else None

    def record_computed(self, window: int, frames: Sequence[StreamFrame], computed: BoolArray) -> None:
        """Record that ``frames`` (the oldest) have KV, and the context of their tokens ``computed [t]``."""
        for frame in frames:
            if frame.computed is None:
                count = len(encoded_tokens(frame))
                frame.first, frame.computed = self.next_token, np.zeros((2, count), np.int64)
                self.next_token += count
        context = np.array([[window], [frames[0].first]])
        for frame, tokens in per_frame(frames, computed):
            assert frame.computed is not None
            frame.computed[:, ... if tokens.all() else tokens] = context
        # Without a pool, only their number is kept.
        self.kv.resize(len(computed))

    def drop_expired_frames(self) -> None:
        """Drop frames that no future window can hold, but never the newest: a frame may be longer than a window."""
        start = self.outstanding[0].start if self.outstanding else self.clock.start
        self.drop_frames(min(opening_index(self.frames, start), max(0, len(self.frames) - 1)))

    def drop_frames(self, count: int) -> None:
        """Drop the oldest ``count`` frames and their KV."""
        gone, self.frames = self.frames[:count], self.frames[count:]
        self._emit_kv(gone)
        # A copy stays allocated as a whole while any frame uses a part of it.
        copies, held = ({frame.moved for frame in frames} for frames in (gone, self.frames))
        self.moved_nbytes -= sum(copy.nbytes for copy in copies - held if copy is not None)
        self.kv.drop_slots(sum(token_counts([frame for frame in gone if frame.has_kv])))
        moving = [frame.window_time for frame in gone if frame.moving]
        if moving:
            self.last_motion_dropped = moving[-1]

    def _emit_kv(self, gone: Sequence[StreamFrame]) -> None:
        """Pass the KV of the oldest frames to ``kv_sink``, skipping frames without KV. A frame that fails, or was not
        recomputed after a failed pass, is reported as lost."""
        if self.kv_sink is None or self.spec.memory is None:
            return
        stop = 0
        for frame in gone:
            if frame.computed is None:
                continue
            first, stop = stop, stop + len(encoded_tokens(frame))
            if first == stop:
                continue
            try:
                valid = not (frame.computed[0] == INVALID).any()
                if valid:
                    self.kv_sink(self._chunk(frame, first, stop))
            except torch.AcceleratorError:
                raise
            except Exception:
                valid = False
                if not self.kv_failed:
                    log.exception("camera %s: a frame leaving its window is not remembered", self.spec.stream)
                self.kv_failed = True
            if not valid and self.kv_lost is not None:
                self.kv_lost(self.spec.stream)

    def _chunk(self, frame: StreamFrame, first: int, stop: int) -> KVChunk:
        """KV of a frame with slots ``[first, stop)``, keys before rotary and without bias."""
        assert frame.positions is not None
        k, v = self.kv.raw(frame.positions, first, stop, bias=False)
        rows, columns = frame.grid.group_rows, frame.grid.group_cols
        row, column = to_device(encoded_tokens(frame).cells, k.device).unbind(-1)
        # Text around a frame gets cells below the grid.
        cell = torch.where(row < 0, rows, row) * columns + column
        look = to_device(embeddings(frame), k.device).float().mean(0)
        return KVChunk(self.spec.stream, frame.index, frame.memory_time, k, v, cell, rows, columns, look)

    # -- memory ---------------------------------------------------------------------------------------
    def copy_to_host(self) -> None:
        """Start moving embeddings to host memory, followed by the copy of the KV."""
        pool = self.kv.pool
        if pool is None or not len(self.kv):
            return
        known = [frame for frame in self.frames if frame.tokens is not None]
        frames = [frame for frame in known if encoded_tokens(frame).embeds.device.type != "cpu"]
        if frames:
            embeds = [encoded_tokens(frame).embeds for frame in frames]
            with pool.copies.outward():
                copy = pool.copies.to_host([torch.cat(embeds)])
            pool.copies.keep_until_read(embeds)
            for frame, held in zip(frames, torch.split(copy[0], [len(each) for each in embeds]), strict=True):
                frame.tokens, frame.moved = replace(encoded_tokens(frame), embeds=held), copy
            self.moved_nbytes += copy.nbytes
        self.kv.copy_to_host()

    @property
    def device_nbytes(self) -> int:
        """Bytes on the model's device."""
        embeds = [frame.tokens.embeds for frame in self.frames if frame.tokens is not None]
        on_device = sum(
            each.nbytes for each in embeds if self.kv.pool is not None and each.device == self.kv.pool.device
        )
        return on_device + (0 if self.kv.on_host else self.kv.nbytes)

    def invalidate_tokens(self, frames: Sequence[StreamFrame], tokens: BoolArray) -> None:
        """Mark KV that a failed pass may have overwritten, of ``tokens [t]`` of ``frames`` (the oldest): it is
        recomputed whatever the policy selects."""
        for frame, wanted in per_frame(frames, tokens):
            if frame.computed is not None:
                frame.computed[0, wanted] = INVALID

    def invalid_tokens(self, frames: Sequence[StreamFrame]) -> BoolArray:
        """Mask ``[t]`` over the tokens of ``frames`` with KV: those :meth:`invalidated <invalidate_tokens>`."""
        windows = np.concatenate((_ZERO, *(f.computed[0] for f in frames if f.computed is not None)))[1:]
        invalid: BoolArray = windows == INVALID
        return invalid

    def discard_unfinished(self) -> None:
        """Free the scratch slots of a pass, and those of new tokens that it did not finish."""
        self.kv.release_scratch()
        finished = sum(token_counts([frame for frame in self.frames if frame.computed is not None]))
        if len(self.kv) > finished:
            self.kv.resize(finished)

    # -- deletion -------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Reset to a fresh start; window numbers continue."""
        self._emit_kv(self.frames)
        self.frames, self.moved_nbytes = [], 0
        self.outstanding.clear()
        self.kv.clear()
        self.progress = None
        self.encoded = self.tower_flops = 0
        self.last = None
        self.windows_since_fresh = 0
        self.last_motion_dropped = None
        self.newest = None

    def delete_frames_before(self, pts: int | None) -> None:
        """Delete frames before ``pts`` (None: all) and their KV, without passing it to ``kv_sink``."""
        kv_sink, self.kv_sink = self.kv_sink, None
        if pts is None:
            self.reset()
        else:
            self.drop_frames(sum(frame.pts < pts for frame in self.frames))
            self.progress = None
        self.kv_sink = kv_sink

    def invalidate_kv(self) -> None:
        """Discard all KV, so that every token is recomputed."""
        self.kv.clear()
        self.progress = None
        for frame in self.frames:
            frame.computed = None

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + sum(frame.nbytes for frame in self.frames)


def _owned(array: UInt8Array) -> UInt8Array:
    """The array, copied if it is a view: a view would keep the whole message alive."""
    return array if array.base is None and array.flags.writeable else array.copy()


def encoded_tokens(frame: StreamFrame) -> FrameTokens:
    """The tokens of a frame that must be encoded."""
    assert frame.tokens is not None
    return frame.tokens


def embeddings(frame: StreamFrame) -> torch.Tensor:
    """Embeddings ``[t, W]`` of an encoded frame; waits for their copy if they were moved to host memory."""
    if frame.moved is not None:
        frame.moved.tensors()
    return encoded_tokens(frame).embeds


def per_frame(frames: Sequence[StreamFrame], tokens: BoolArray) -> Iterator[tuple[StreamFrame, BoolArray]]:
    """Each frame that has any of the masked ``tokens [t]``, with its part of the mask."""
    ends = [0, *np.cumsum(token_counts(frames)).tolist()]
    counted = np.concatenate((_ZERO, np.cumsum(tokens)))[ends]
    for index in np.flatnonzero(counted[1:] != counted[:-1]).tolist():
        yield frames[index], tokens[ends[index] : ends[index + 1]]


def token_counts(frames: Sequence[StreamFrame]) -> list[int]:
    """Token count of each encoded frame."""
    return [frame.tokens.count for frame in frames if frame.tokens is not None]


def own_positions(frames: Sequence[StreamFrame]) -> torch.Tensor:
    """Positions ``[3, t]`` of encoded frames' tokens in the stream's own time: ``(time, row, column)``, with time
    counted from the stream's beginning, whatever the window."""
    return torch.cat([frame.positions for frame in frames if frame.positions is not None], dim=1)


def frame_spans(frames: Sequence[StreamFrame], *, after_s: float = 0.0, after_slots: int = 0) -> list[FrameSpan]:
    """Temporal placement of a window's frames, after ``after_s`` seconds and ``after_slots`` slots of earlier content.

    Slots count frames: they ascend by one even if the camera's rate changes or frames are lost.
    """
    return [
        FrameSpan(
            time_s=after_s + (frame.pts - frames[0].pts) / MICROSECONDS,
            slot=after_slots + number,
            cells=encoded_tokens(frame).cells,
            grid=frame.grid,
        )
        for number, frame in enumerate(frames)
    ]
