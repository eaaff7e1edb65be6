"""State of each camera's path to a replica: queue, frames in flight, and hand-over to another replica.

No I/O and no locking: :class:`~cluster.decoder.frame_sender.FrameSender` holds its lock around every use.
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
    """A camera whose window at the replica is lost, or whose replica is unreachable.

    ``frames``: queued and in-flight frames lost. ``refused``: the replica is reachable but refused the camera's
    specification (``spec``), one of its frames (``frame``), or all of them as the camera is not open there
    (``not_open``); it is then reopened with its next fresh frame. ``settled``: windows that the old replica had settled
    when a hand-over failed; the open window is lost, and the new replica continues from a fresh frame already sent or
    held.
    """

    camera: str
    address: str
    frames: int
    reason: str
    refused: RefusalName = ""
    settled: int | None = None


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """Status of one camera's path. ``sent``, ``dropped`` (before sending) and ``lost`` (refused by the replica, or
    unacknowledged when its connection broke) count frames. ``windows``: see :attr:`Lane.counters`; ``refused``: why
    the replica refuses the camera's frames, empty once it accepts them again; ``unreachable``: see
    :class:`ReplicaLink`."""

    address: str
    unreachable: bool
    queued: int
    in_flight: int
    sent: int
    dropped: int
    lost: int
    windows: WindowCounters
    refused: str


@dataclass(slots=True)
class HandOver:
    """A camera being handed over to ``target``. Frames from the next fresh one on are ``held`` until the old replica
    is done.

    ``fresh``: the fresh frame has arrived. ``leaving``: no more frames are queued for the old replica; ``close_sent``:
    its close message was sent. ``done``: it has ``closed`` the camera, and perhaps ``saved`` its window, or is gone.
    """

    target: str
    held: deque[frames_pb2.Frame] = field(default_factory=deque)
    fresh: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    close_sent: bool = False
    closed: bool = False
    saved: bool = False


@dataclass(slots=True)
class Lane:
    """One camera's frames queued for and in flight to ``address``.

    ``term``: see ``StreamOpen``. ``opened``: specification it was opened with on this connection, None if not open.
    ``not_open``: the replica reported it as not open, so the next frame reopens it. ``stale``: last frame in flight
    when it was opened; refusals up to it predate that. ``windows``: counts at ``address``; ``before``: at replicas that
    handed the camera over.
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
    # Start of the first frame of a dropped queue, on the camera's clock, until the camera has read it.
    cut: int | None = None

    @property
    def counters(self) -> WindowCounters:
        """Windows at this and earlier replicas; at earlier ones only settled windows count as closed."""
        now, before = self.windows, self.before
        done, gated, dropped = now.done + before.done, now.gated + before.gated, now.dropped + before.dropped
        return WindowCounters(done, gated, dropped, now.closed + before.settled, now.end)

    @property
    def at_replica(self) -> bool:
        """Whether the replica knows the camera on this connection, even if it refuses it as not open."""
        return self.opened is not None or self.not_open

    @property
    def must_open(self) -> bool:
        """Whether to send the specification to the replica now; one that hands the camera over needs no newer one."""
        if self.not_open and not self.queue:
            return False
        return self.opened is None or (self.hand_over is None and self.opened != self.spec)

    def wants(self, sample: FrameSample) -> bool:
        """Whether a frame is usable: after a loss, and once a hand-over has begun, only from a random access frame."""
        left = self.hand_over is not None and self.hand_over.leaving and not self.hand_over.held
        return sample.random_access or not (self.wants_fresh or left)

    def enqueue(
        self, sample: FrameSample, message: frames_pb2.Frame, most: int
    ) -> Literal["queued", "held", "dropped"]:
        """Enqueue a frame, first dropping a queue that already holds ``most`` frames."""
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
        """Drop queued or held frames, counted as never sent."""
        metrics.frames_dropped.labels(reason).inc(len(frames))
        self.dropped += len(frames)
        frames.clear()

    def drop_unsent(self) -> None:
        """Drop everything not sent yet, as the camera is closed."""
        self.drop(self.queue, "closed")
        if self.hand_over is not None:
            self.drop(self.hand_over.held, "closed")

    def cut_queue(self) -> None:
        """Mark the queued frames as never to be sent."""
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
        """Apply an acknowledgement of a frame or of the camera; returns the loss if it is a refusal."""
        if not ack.opened and ack.index in self.in_flight:
            while self.in_flight.popleft() != ack.index:
                pass
        self.credit = ack.credit
        end = ack.window_end if ack.HasField("window_end") else None
        self.windows = WindowCounters(ack.windows_done, ack.windows_gated, ack.windows_dropped, ack.windows_closed, end)
        if ack.closed and self.hand_over is not None:
            self.hand_over.closed, self.hand_over.saved = True, ack.saved
            self.hand_over.done.set()
        # After a refusal, the replica discards frames in flight and acknowledges them without another refusal.
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

    def status(self, *, unreachable: bool) -> LaneStatus:
        waiting, under_way = len(self.queue), len(self.in_flight)
        counts = self.sent, self.dropped, self.lost
        return LaneStatus(self.address, unreachable, waiting, under_way, *counts, self.counters, self.refused)


@dataclass(slots=True)
class ReplicaLink:
    """The stream to one replica: ``ready`` cameras that may have something to send, and ``closes`` of departed ones.

    ``in_flight``: unacknowledged frames sent on this connection, departed cameras' included. ``unreachable``: the last
    connection attempt failed, or the connection broke. ``task``: connects and sends.
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
