"""State of each camera's path to a replica: queue, frames in flight, and hand-over to another replica.

Nothing here waits or sends; :class:`~cluster.decoder.frame_sender.FrameSender` holds its lock around every use.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from sightline.v1 import frames_pb2

from cluster import metrics
from cluster.types import FrameSample, StreamSpec
from cluster.types.reports import WindowCounters

RefusalName = Literal["", "frame", "spec", "not_open"]

_REFUSALS: dict[int, RefusalName] = {
    frames_pb2.FRAME_REFUSAL_FRAME: "frame",
    frames_pb2.FRAME_REFUSAL_SPEC: "spec",
    frames_pb2.FRAME_REFUSAL_NOT_OPEN: "not_open",
}


@dataclass(frozen=True, slots=True)
class LostCamera:
    """A camera whose window at the replica is gone, or whose replica cannot be reached.

    ``frames``: queued and in-flight frames that were lost. ``refused``: the replica is reachable but refused the
    camera's specification (``spec``), one of its frames (``frame``), or all of them because the camera is not open
    there (``not_open``): it is opened again with its next fresh frame. ``settled``: a hand-over failed after the old
    replica had settled so many windows; the open window is lost, and frames continue at the new replica with a fresh
    one that has been sent or held already.
    """

    camera: str
    address: str
    frames: int
    reason: str
    refused: RefusalName = ""
    settled: int | None = None


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """Status of one camera's path. Frames: ``sent``; ``dropped`` before that; ``lost`` after it: the replica did not
    take them, or its connection broke before it told so. ``windows``: see :attr:`Lane.counters`; ``refused``: why the
    replica refuses the camera's frames, empty once it accepts them again."""

    address: str
    connected: bool
    queued: int
    in_flight: int
    sent: int
    dropped: int
    lost: int
    windows: WindowCounters
    refused: str


@dataclass(slots=True)
class HandOver:
    """A camera being handed over to ``target``. Frames from its fresh one on are ``held`` until the old replica is
    done.

    ``fresh``: that frame has come; ``leaving``: nothing more goes to the old replica, which has been ``told``;
    ``done``: it has ``closed`` the camera and perhaps ``saved`` its window, or is gone.
    """

    target: str
    held: deque[frames_pb2.Frame] = field(default_factory=deque)
    fresh: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    told: bool = False
    closed: bool = False
    saved: bool = False


@dataclass(slots=True)
class Lane:
    """One camera: frames queued for and in flight to ``address``.

    ``term``: see ``StreamOpen``; ``opened``: with which specification on this connection, None if not; ``not_open``:
    reported by the replica, so the next frame opens it again; ``stale``: last of the frames in flight then, whose
    refusals are older. ``windows``: there; ``before``: at replicas that have handed the camera over.
    """

    spec: StreamSpec
    address: str
    term: int
    queue: deque[frames_pb2.Frame] = field(default_factory=deque)
    in_flight: deque[int] = field(default_factory=deque)
    credit: int = 0
    opened: StreamSpec | None = None
    not_open: bool = False
    stale: int = -1
    refused: str = ""
    wants_fresh: bool = True
    closing: frames_pb2.StreamClose | None = None
    sent: int = 0
    dropped: int = 0
    lost: int = 0
    windows: WindowCounters = field(default_factory=WindowCounters)
    before: WindowCounters = field(default_factory=WindowCounters)
    hand_over: HandOver | None = None
    # Start of the first frame of a dropped queue, on the camera's clock, until the camera is told.
    cut: int | None = None

    @property
    def counters(self) -> WindowCounters:
        """Windows at this and earlier replicas; of the earlier ones only settled windows have closed."""
        now, before = self.windows, self.before
        done, gated, dropped = now.done + before.done, now.gated + before.gated, now.dropped + before.dropped
        return WindowCounters(done, gated, dropped, now.closed + before.settled, now.end)

    @property
    def must_open(self) -> bool:
        """Whether the replica must be told the specification now; one that hands the camera over needs no newer one."""
        if self.not_open and not self.queue:
            return False
        return self.opened is None or (self.hand_over is None and self.opened != self.spec)

    def wants(self, sample: FrameSample) -> bool:
        """Whether a frame can be used: after a loss, and once a hand-over has begun, only after a fresh one."""
        left = self.hand_over is not None and self.hand_over.leaving and not self.hand_over.held
        return sample.random_access or not (self.wants_fresh or left)

    def enqueue(
        self, sample: FrameSample, message: frames_pb2.Frame, most: int
    ) -> Literal["queued", "held", "dropped"]:
        """Queue a frame. A queue that holds ``most`` frames is dropped as a whole."""
        move = self.hand_over if self.hand_over is not None and (sample.random_access or self.hand_over.held) else None
        queue = self.queue if move is None else move.held
        if len(queue) >= most:
            self.cut = queue[0].pts
            self.drop(queue, "replica_slow")
            self.wants_fresh = True
        if not self.wants(sample):
            self.dropped += 1
            return "dropped"
        self.wants_fresh = False
        queue.append(message)
        return "queued" if move is None else "held"

    def drop(self, frames: deque[frames_pb2.Frame], reason: str) -> None:
        """Drop queued or held frames, as never sent."""
        metrics.frames_dropped.labels(reason).inc(len(frames))
        self.dropped += len(frames)
        frames.clear()

    def drop_unsent(self, reason: str) -> None:
        self.drop(self.queue, reason)
        if self.hand_over is not None:
            self.drop(self.hand_over.held, reason)

    def cut_queue(self) -> None:
        """Note that the queued frames will never be sent."""
        if self.queue:
            self.cut = self.queue[0].pts

    def reset(self) -> int:
        """Drop queued and in-flight frames; returns how many."""
        frames = len(self.queue) + len(self.in_flight)
        self.drop(self.queue, "no_replica")
        self.lost += len(self.in_flight)
        self.in_flight.clear()
        self.credit, self.opened, self.wants_fresh = 0, None, True
        self.not_open, self.refused = False, ""
        return frames

    def finish_hand_over(self, move: HandOver) -> None:
        """Continue at the hand-over's target, with the held frames."""
        self.before = self.counters if move.saved else WindowCounters()
        self.windows = WindowCounters()
        self.address, self.queue, self.hand_over = move.target, move.held, None
        self.wants_fresh = not self.queue

    def acknowledge(self, ack: frames_pb2.FrameAck) -> LostCamera | None:
        """Apply an acknowledgement of a frame or of the camera; returns what was refused."""
        if not ack.opened and ack.index in self.in_flight:
            while self.in_flight.popleft() != ack.index:
                pass
        self.credit = ack.credit
        end = ack.window_end if ack.HasField("window_end") else None
        self.windows = WindowCounters(ack.windows_done, ack.windows_gated, ack.windows_dropped, ack.windows_closed, end)
        if ack.closed and self.hand_over is not None:
            self.hand_over.closed, self.hand_over.saved = True, ack.saved
            self.hand_over.done.set()
        # After a refusal, frames that were on their way are discarded and acknowledged without another one.
        if ack.refused or not self.wants_fresh:
            self.refused = ack.refused
        self.lost += ack.frames_lost
        refused = _REFUSALS.get(ack.refusal, "frame")
        if not ack.refused or (refused == "not_open" and self.opened and not ack.opened and ack.index <= self.stale):
            return None
        if refused == "not_open":
            self.opened, self.not_open = None, True
        frames = len(self.queue) + ack.frames_lost
        self.drop(self.queue, "refused")
        self.wants_fresh = True
        return LostCamera(ack.camera, self.address, frames, ack.refused, refused)

    def status(self, *, connected: bool) -> LaneStatus:
        waiting, under_way = len(self.queue), len(self.in_flight)
        counts = self.sent, self.dropped, self.lost
        return LaneStatus(self.address, connected, waiting, under_way, *counts, self.counters, self.refused)


@dataclass(slots=True)
class ReplicaLink:
    """One replica: lanes that may have something to send, and closing messages of lanes that have left.

    ``in_flight``: frames sent on this connection and not acknowledged, those of lanes that have left included.
    ``unreachable``: the last attempt to connect failed, or the connection broke. ``task``: connects and sends.
    """

    address: str
    ready: deque[str] = field(default_factory=deque)
    closes: deque[frames_pb2.StreamClose] = field(default_factory=deque)
    in_flight: int = 0
    work: asyncio.Event = field(default_factory=asyncio.Event)
    woken: bool = False
    connected: bool = False
    unreachable: bool = False
    task: asyncio.Task[None] | None = None
