"""Ring buffer of a camera's newest encoded packets, so that clips can begin before their incident. Decodes nothing."""

import itertools
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from cluster.codec.source import StreamHeader
from cluster.codec.timeline import LONGEST_STEP
from cluster.decoder.footage.segments import Segment, Segmenter, SegmentPacket
from cluster.types import MICROSECONDS, EncodedPacket

STOPPED = "the camera was stopped"
OF_CAMERA, OF_ALL = "clips.ring_camera_bytes", "clips.ring_bytes"


class RingBudget:
    """Byte limit shared by all rings of a process; thread-safe.

    Above the limit, rings holding more than their equal share shrink, so that quiet cameras keep theirs. The total
    exceeds the limit by at most one packet per ring.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.short = 0
        """Number of rings that reach back less far than configured."""
        self._rings = 0
        self._lock = threading.Lock()

    def change(self, *, rings: int = 0, held: int = 0, short: int = 0) -> None:
        """Add to the counts of rings, of bytes held, and of short rings."""
        with self._lock:
            self._rings += rings
            self.held += held
            self.short += short

    def is_exceeded(self, own: int) -> bool:
        """Whether a ring holding ``own`` bytes must shrink."""
        with self._lock:
            return self.held > self.limit and own > self.limit // max(1, self._rings)


@dataclass(slots=True)
class _Gop:
    """Packets from a random access point up to the next one."""

    segment: Segment
    arrived_s: float
    packets: list[SegmentPacket] = field(default_factory=list)
    bytes: int = 0


class Recording:
    """Packets of one clip: those held by the ring, then live ones, up to ``until``. Created by
    :meth:`PacketRing.record`; read by one thread while the camera's thread appends.

    ``most_bytes``: limit on its total size, or, if ``endless``, on the bytes queued for its reader. ``missing``: why it
    begins late; ``end_reason``: why it ended early; each empty if it did not.
    """

    def __init__(
        self, segment: Segment | None, start: int, until: int, most_bytes: int, *, endless: bool = False
    ) -> None:
        self._endless = endless
        self.segment = segment
        self.start = start
        self.until = until
        self.missing = ""
        self.end_reason = "" if segment is not None else "the camera sent no keyframe"
        self.losses = 0
        self.complete = False
        self._bytes_left = most_bytes
        self._packets: deque[SegmentPacket] = deque()
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether no packet will be added."""
        return self.complete or bool(self.end_reason)

    def pop_packets(self, most: int = 32) -> list[SegmentPacket]:
        """Remove and return up to ``most`` packets; empty while none are queued."""
        with self._lock:
            taken = [self._packets.popleft() for _ in range(min(most, len(self._packets)))]
            if self._endless:
                self._bytes_left += sum(len(placed.packet.data) for placed in taken)
            return taken

    def end(self, why: str) -> None:
        with self._lock:
            if not self.done:
                self.end_reason = why

    def add_packet(self, placed: SegmentPacket) -> None:
        with self._lock:
            if self.done:
                return
            if placed.segment is not self.segment:
                assert self.segment is not None
                self.end_reason = self.segment.end_reason or "the stream was interrupted"
            elif placed.order >= self.until:
                self.complete = True
            elif self._bytes_left < len(placed.packet.data):
                self.end_reason = "it reached the size limit"
            else:
                self._bytes_left -= len(placed.packet.data)
                self.losses += placed.after_loss
                self._packets.append(placed)


class PacketRing:
    """Packets of about the last ``keep_s`` seconds of one camera, in whole GOPs of at most ``most_bytes`` together.

    The camera's thread calls :meth:`open`, :meth:`add_packet` and :meth:`close`; the rest is callable from any thread.
    A GOP larger than ``most_bytes`` is dropped as a whole, which leaves the ring empty until the next keyframe.
    """

    def __init__(self, keep_s: float, most_bytes: int, budget: RingBudget) -> None:
        self.keep_s = keep_s
        self.most_bytes = most_bytes
        self._budget = budget
        self._lock = threading.Lock()
        self._segmenter = Segmenter()
        self._gops: deque[_Gop] = deque()
        self._recordings: list[Recording] = []
        self.bytes = 0
        self.short = ""
        """Setting that limits the ring to less than ``keep_s``; empty if none does."""
        self._joined = True
        self._overflowed = False
        self.arrived_s = 0.0
        """Arrival of the newest packet, monotonic seconds; 0 before the first keyframe."""
        budget.change(rings=1)

    def shortage(self) -> str:
        """:attr:`short` as a sentence with figures."""
        held_s = self.seconds
        rate = f" at {8e-6 * self.bytes / held_s:.1f} Mbit/s" if held_s else ""
        limit = f"{self.most_bytes / 1e6:.0f} MB"
        if self.short == OF_ALL:
            limit = f"{self._budget.limit / 1e6:.0f} MB for all cameras"
        return (
            f"its packets reach back {held_s:.0f} of {self.keep_s:.0f} s{rate}, so that clips begin late: "
            f"{self.short} is {limit}"
        )

    @property
    def seconds(self) -> float:
        """Seconds of video held."""
        with self._lock:
            return self._gops[-1].packets[-1].at_s - self._gops[0].packets[0].at_s if self._gops else 0.0

    # -- the camera's thread --------------------------------------------------------------------
    def open(self, header: StreamHeader) -> None:
        with self._lock:
            self._segmenter.open(header)
            self._end_recordings()

    def add_packet(self, packet: EncodedPacket) -> None:
        with self._lock:
            placed = self._segmenter.assign(packet)
            self._end_recordings()
            if placed is None or not self._joined:
                return
            for recording in self._recordings:
                recording.add_packet(placed)
            self._drop_ended()
            now_s = time.monotonic()
            if placed.starts:
                self._gops.append(_Gop(placed.segment, now_s))
                self._overflowed = False
            elif self._overflowed or not self._gops or self._gops[-1].segment is not placed.segment:
                return
            self.arrived_s = now_s
            group, size = self._gops[-1], len(packet.data)
            group.packets.append(placed)
            group.bytes += size
            self.bytes += size
            self._budget.change(held=size)
            self._trim(placed.at_s)

    def pause(self, why: str) -> None:
        """End the segment and its recordings, as the camera stopped sending; keeps the packets held."""
        with self._lock:
            self._segmenter.end(why)
            self._end_recordings(why)

    # -- any thread -----------------------------------------------------------------------------
    def record(self, start: int, until: int, moment: int | None = None) -> Recording:
        """Start a clip from ``start`` to ``until``, in camera microseconds. It begins with the GOP of ``start``, or the
        oldest after it. If nothing of that span is held, the newest video of the same length is recorded instead.
        ``moment``: a time the camera's clock had already reached, which rules out a clock restarted since."""
        with self._lock:
            reached = start if moment is None else (start + moment) // 2
            groups, missing = self._find_gops(start, until, reached), ""
            if not groups and self._gops:
                # If the camera has only just connected, include video still to come.
                newest, segment = self._gops[-1].packets[-1].order + 1, self._gops[-1].segment
                first = next(group for group in self._gops if group.segment is segment).packets[0].order
                start, until = newest - (until - start), max(newest, first + (until - start))
                groups = self._find_gops(start, until, start)
                missing = "its time is no longer buffered, this is the newest"
            recording = Recording(groups[0].segment if groups else None, start, until, 2 * self.most_bytes)
            recording.missing = missing
            if groups:
                first = groups[0].packets[0].time
                if not missing and first > start + MICROSECONDS:
                    late_s = (first - start) / MICROSECONDS
                    gone = groups[0].segment.cut
                    recording.missing = (
                        f"its first {late_s:.0f} s are no longer buffered"
                        if gone
                        else f"the camera's video begins {late_s:.0f} s into it"
                    )
                for placed in (each for group in groups for each in group.packets):
                    recording.add_packet(placed)
                if groups[0].segment.end_reason:
                    recording.end(groups[0].segment.end_reason)
                elif not recording.done:
                    self._recordings.append(recording)
            return recording

    def follow(self, most_bytes: int) -> Recording:
        """Follow the packets from the newest keyframe on, until the segment ends or more than ``most_bytes`` are queued
        for the reader."""
        with self._lock:
            newest = self._gops[-1] if self._gops else None
            if newest is None or newest.segment.end_reason:
                return Recording(None, 0, 0, most_bytes)
            first = newest.packets[0]
            recording = Recording(newest.segment, first.order, 2**62, most_bytes + newest.bytes, endless=True)
            for placed in newest.packets:
                recording.add_packet(placed)
            self._recordings.append(recording)
            return recording

    def gop_packets(self, time: int) -> list[SegmentPacket]:
        """Packets for decoding the picture at ``time``: those of its GOP, else of the newest."""
        with self._lock:
            # ``time`` may be somewhat after the newest packet.
            since = time - LONGEST_STEP
            groups = self._find_gops(since, time + 1, since) or list(self._gops)[-1:]
            begun = [group for group in groups if group.packets[0].time <= time] or groups
            return list(begun[-1].packets) if begun else []

    def delete_before(self, before_s: float = 0.0) -> int:
        """Drop GOPs that began more than ``before_s`` seconds ago (0: all) and end recordings that begin earlier;
        returns the bytes dropped."""
        with self._lock:
            held, groups, now_s = self.bytes, self._gops, time.monotonic()
            newest = groups[-1].packets[-1] if groups else None
            keep_s = before_s - (now_s - self.arrived_s) if before_s else -math.inf
            # While a camera is disconnected, wall time passes but video time does not: check both.
            while (
                newest is not None
                and groups
                and (newest.at_s - groups[0].packets[0].at_s > keep_s or now_s - groups[0].arrived_s > before_s)
            ):
                self._drop_gop(groups.popleft())
            self._overflowed |= not groups
            for recording in self._recordings:
                if newest is None or recording.start < newest.order - keep_s * MICROSECONDS:
                    recording.end("the camera was forgotten")
            self._drop_ended()
            return held - self.bytes

    def expire(self, idle_s: float) -> None:
        """Drop all packets if the camera has sent nothing for ``idle_s``."""
        if self.bytes and time.monotonic() - self.arrived_s > idle_s:
            self.delete_before()

    def close(self) -> None:
        """Remove the ring from the budget; idempotent."""
        with self._lock:
            if not self._joined:
                return
            self._joined = False
            self._gops.clear()
            self._note_short("")
            self._budget.change(rings=-1, held=-self.bytes)
            self.bytes = 0
            self._end_recordings(STOPPED)

    # -- internals ------------------------------------------------------------------------------
    def _find_gops(self, start: int, until: int, reached: int) -> list[_Gop]:
        """GOPs of the segment that covers most of the period, the newest of equals; empty if none does. Of several runs
        of the camera's clock, the newest that reaches ``reached``."""
        best: list[_Gop] = []
        longest = 0
        for _, of_segment in itertools.groupby(self._gops, lambda group: id(group.segment)):
            groups = list(of_segment)
            first, last = groups[0].packets[0].time, max(placed.time for placed in groups[-1].packets)
            if last < start:
                continue
            # An open segment will still cover the rest.
            covered = min(until, last + 1 if groups[0].segment.end_reason else until) - max(start, first)
            another_run = bool(best) and groups[0].segment.run != best[0].segment.run
            if covered > 0 and (last >= reached if another_run else covered >= longest):
                best, longest = groups, covered
        begins = [group for group in best[1:] if group.packets[0].time <= start]
        return best[len(begins) :]

    def _trim(self, at_s: float) -> None:
        groups = self._gops
        while len(groups) > 1:
            old = at_s - groups[1].packets[0].at_s >= self.keep_s
            short = "" if old else self._exceeded_limit()
            if not old and not short:
                return
            self._note_short(short)
            self._drop_gop(groups.popleft())
        if short := self._exceeded_limit():
            self._note_short(short)
            self._drop_gop(groups.popleft())
            self._overflowed = True

    def _drop_gop(self, group: _Gop) -> None:
        group.segment.cut = True
        self.bytes -= group.bytes
        self._budget.change(held=-group.bytes)

    def _exceeded_limit(self) -> str:
        """The setting whose limit is exceeded, or empty."""
        if self.bytes > self.most_bytes:
            return OF_CAMERA
        return OF_ALL if self._budget.is_exceeded(self.bytes) else ""

    def _note_short(self, short: str) -> None:
        self._budget.change(short=bool(short) - bool(self.short))
        self.short = short

    def _end_recordings(self, why: str = "") -> None:
        """End recordings whose segment has ended, or all of them with reason ``why``."""
        for recording in self._recordings:
            if reason := why or (recording.segment.end_reason if recording.segment is not None else ""):
                recording.end(reason)
        self._drop_ended()

    def _drop_ended(self) -> None:
        if self._recordings:
            self._recordings = [each for each in self._recordings if not each.done]
