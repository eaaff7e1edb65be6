"""What the engine holds of one stream: the frames of its windows, their KV, and its last answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cluster.engine.base import WindowRequest
from cluster.engine.window.kv import KVSlab
from cluster.engine.window.planner import BoolArray, IntArray
from cluster.engine.window.windows import WindowClock, WindowSpan, opening, place, reach
from cluster.memory.head_memory import KVChunk, KVSink
from cluster.models.base import FrameSpan, FrameTokens
from cluster.types import MICROSECONDS, Answer, BoolGrid, FrameSample, PatchGrid, Question, StreamSpec, UInt8Array


@dataclass(slots=True, eq=False)
class StreamFrame:
    """One frame of a stream: patches until it is encoded, embeddings from then on, KV once a window computed it.

    * ``size``: visual tokens (0: fully pruned; it takes time and no slots)
    * ``patches``: uint8 as in ``FrameSample``, ``None`` once encoded
    * ``first``: number of its first token among all tokens of the stream that ever got KV
    * ``computed`` ``[3, t]``, ``None`` without KV: per token the window it was last computed in, the number of that
      window's first token, and that window's opening (pts)
    * ``content``: digest of ``tokens``, for engines that know frames by it; "" before it was asked for
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
    tokens: FrameTokens | None = None
    first: int = 0
    computed: IntArray | None = None
    content: str = ""

    @classmethod
    def of(cls, sample: FrameSample) -> StreamFrame:
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
        )

    @property
    def place(self) -> int:
        return place(self)

    @property
    def moving(self) -> bool:
        """Something changed in it against what was seen before, be it an anchor or not."""
        return self.activity > 0

    @property
    def has_kv(self) -> bool:
        return self.computed is not None

    @property
    def nbytes(self) -> int:
        held = self.mask.nbytes
        if self.patches is not None:
            held += self.patches.nbytes
        if self.tokens is not None:
            held += self.tokens.embeds.nbytes + self.tokens.cells.nbytes
        if self.computed is not None:
            held += self.computed.nbytes
        return held


@dataclass(frozen=True, slots=True)
class LastWindow:
    """The last window that was computed, and what it answered to which questions."""

    window: int
    end: int
    questions: tuple[Question, ...]
    answers: tuple[Answer, ...]


@dataclass(slots=True)
class StreamCounters:
    """What happened to a stream's windows since it was admitted."""

    computed: int = 0
    gated: int = 0
    expired: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """One stream. ``frames`` are ascending in pts; those with KV come first and lie in ``kv`` in the same order."""

    spec: StreamSpec
    kv: KVSlab
    clock: WindowClock
    frames: list[StreamFrame] = field(default_factory=list)
    outstanding: list[WindowSpan] = field(default_factory=list)
    last: LastWindow | None = None
    # Windows computed since the stream began or began afresh.
    windows_since_fresh: int = 0
    # Numbers, among all tokens that ever got KV, of the next one and of the first since the stream began (afresh).
    next_token: int = 0
    first_token: int = 0
    # The newest moving frame that is no longer held.
    last_motion_dropped: int | None = None
    newest: int | None = None
    counters: StreamCounters = field(default_factory=StreamCounters)
    # Who is handed the KV of frames that no window to come can hold.
    leave: KVSink | None = None

    # -- frames in ------------------------------------------------------------------------------------
    def push(self, sample: FrameSample, arrived_s: float) -> list[WindowRequest]:
        """See ``Engine.push``."""
        if self.newest is None or sample.fresh or (sample.gap and not self._follows(sample)):
            self.forget()
            self.clock.restart(sample.pts)
        elif sample.pts <= self.newest:
            raise ValueError(
                f"frame {sample.index} of {self.spec.stream} has pts {sample.pts}, not after {self.newest}; "
                "send frames in order, or mark the first one of a restarted clock as fresh"
            )
        frame = StreamFrame.of(sample)
        closed = self.clock.close(frame.place, reach(self.frames[-1]) if self.frames else None)
        self.frames.append(frame)
        self.newest = frame.pts
        until = frame.place + frame.duration
        closed += self.clock.close(until, until)
        return self._request(closed, arrived_s)

    def _follows(self, sample: FrameSample) -> bool:
        """Whether windows go on with this frame, which its sender calls one after a gap without knowing what is here:
        not where another decoder, or another process's window, tells of a camera that was set up anew since."""
        assert self.newest is not None
        return sample.pts > self.newest and (not self.frames or sample.grid == self.frames[-1].grid)

    def flush(self, arrived_s: float) -> list[WindowRequest]:
        """See ``Engine.flush``: the window ends where its last frame does."""
        if not self.frames or (self.frames[-1].place < self.clock.end - self.clock.stride):
            return []
        frame = self.frames[-1]
        span = WindowSpan(self.clock.number, self.clock.start, frame.pts + frame.duration)
        self.clock.number += 1
        self.clock.end += self.clock.stride
        return self._request([span], arrived_s)

    def _request(self, closed: list[WindowSpan], arrived_s: float) -> list[WindowRequest]:
        self.outstanding.extend(closed)
        # A window one whole window behind the newest is no longer answered, so that memory is bounded.
        while self.outstanding and self.outstanding[0].end <= self.outstanding[-1].end - self.clock.window:
            del self.outstanding[0]
        self.trim()
        return [WindowRequest(self.spec.stream, s.number, s.start, s.end, arrived_s) for s in closed]

    # -- windows --------------------------------------------------------------------------------------
    def take(self, request: WindowRequest) -> bool:
        """Whether this window can still be answered; those before it no longer can."""
        while self.outstanding and self.outstanding[0].number < request.window:
            del self.outstanding[0]
        if self.outstanding and self.outstanding[0].number == request.window:
            del self.outstanding[0]
            return True
        self.counters.expired += 1
        return False

    def window_frames(self, start: int, end: int) -> list[StreamFrame]:
        """The frames of a window, from the one it opens at."""
        first = opening(self.frames, start)
        return [frame for frame in self.frames[first:] if frame.place < end]

    def commit(self, window: int, frames: Sequence[StreamFrame], computed: BoolArray) -> None:
        """After a window was computed, whose ``frames`` are the oldest here: they have KV, and each token that was
        ``computed [t]`` knows under which context."""
        for frame in frames:
            if frame.computed is None:
                count = len(tokens_of(frame))
                frame.first, frame.computed = self.next_token, np.zeros((3, count), np.int64)
                self.next_token += count
        context = np.array([[window], [frames[0].first], [frames[0].pts]])
        start = 0
        for frame in frames:
            assert frame.computed is not None
            stop = start + frame.computed.shape[1]
            frame.computed[:, computed[start:stop]] = context
            start = stop
        self.kv.length = start

    def trim(self) -> None:
        """Let go of frames that no window to come can hold."""
        start = self.outstanding[0].start if self.outstanding else self.clock.start
        self.drop(opening(self.frames, start))

    def drop(self, count: int) -> None:
        """Let go of the oldest ``count`` frames and their KV."""
        gone, self.frames = self.frames[:count], self.frames[count:]
        self._hand_on(gone)
        self.kv.drop(sum(len(frame.tokens) for frame in gone if frame.has_kv and frame.tokens is not None))
        moving = [frame.place for frame in gone if frame.moving]
        if moving:
            self.last_motion_dropped = moving[-1]

    def _hand_on(self, gone: Sequence[StreamFrame]) -> None:
        """Give the oldest frames' KV to whoever keeps it; those that no window computed have none."""
        if self.leave is None:
            return
        for chunk in chunks_of(self.spec.stream, gone, self.kv):
            self.leave(chunk)

    # -- forgetting -----------------------------------------------------------------------------------
    def forget(self) -> None:
        """The stream begins afresh: nothing before counts, window numbers go on."""
        self._hand_on(self.frames)
        self.frames = []
        self.outstanding.clear()
        self.kv.clear()
        self.last = None
        self.windows_since_fresh = 0
        self.first_token = self.next_token
        self.last_motion_dropped = None
        self.newest = None

    def forget_before(self, pts: int | None) -> None:
        """Let go of frames before ``pts`` (None: of all) and of their KV, and hand it to nobody."""
        leave, self.leave = self.leave, None
        if pts is None:
            self.forget()
        else:
            self.drop(sum(frame.pts < pts for frame in self.frames))
        self.leave = leave

    def lose_kv(self) -> None:
        """A computation broke off halfway: what it wrote cannot be told from what was there, so compute all again."""
        self.first_token = self.next_token
        self.kv.clear()
        for frame in self.frames:
            frame.computed = None

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + sum(frame.nbytes for frame in self.frames)


def chunks_of(stream: str, frames: Sequence[StreamFrame], kv: KVSlab) -> Iterator[KVChunk]:
    """The oldest ``frames`` of ``kv`` as they are handed on; those without KV or without a token are passed over."""
    key, value = kv.stretch()
    first = 0
    for frame in frames:
        if not frame.has_kv or frame.tokens is None:
            continue
        slots = slice(first, first + len(frame.tokens))
        first = slots.stop
        if len(frame.tokens):
            rows, columns = frame.grid.group_rows, frame.grid.group_cols
            row, column = frame.tokens.cells.to(key.device).unbind(-1)
            # Text that a family writes around a frame counts as lying below it.
            cell = torch.where(row < 0, rows, row) * columns + column
            kept = (key[:, :, slots].clone(), value[:, :, slots].clone())
            look = frame.tokens.embeds.float().mean(0)
            yield KVChunk(stream, frame.index, frame.pts, *kept, cell, rows, columns, look)


def _owned(array: UInt8Array) -> UInt8Array:
    """The array itself if its memory is its own; a copy of a view, which would keep a whole message alive."""
    return array if array.base is None and array.flags.writeable else array.copy()


def tokens_of(frame: StreamFrame) -> FrameTokens:
    """Tokens of a frame that went through the tower."""
    assert frame.tokens is not None
    return frame.tokens


def spans_of(frames: Sequence[StreamFrame], *, after_s: float = 0.0, after_slots: int = 0) -> list[FrameSpan]:
    """Places of a window's frames, behind ``after_s`` seconds and ``after_slots`` slots of what stands before it.

    Slots count frames: those of a camera whose rate changes, or that lost some, still ascend by whole frames.
    """
    return [
        FrameSpan(
            time_s=after_s + (frame.pts - frames[0].pts) / MICROSECONDS,
            slot=after_slots + number,
            cells=tokens_of(frame).cells,
            grid=frame.grid,
        )
        for number, frame in enumerate(frames)
    ]
