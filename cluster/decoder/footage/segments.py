"""Splits a packet stream into segments of one codec, picture size and run of the camera's clock."""

from dataclasses import dataclass

from cluster.codec.nal import FRAMED_CODECS, parameter_sets, starts_decoding
from cluster.codec.source import StreamHeader
from cluster.codec.timeline import LONGEST_STEP, PATIENCE, REPEAT
from cluster.types import MICROSECONDS, EncodedPacket

_LATE = 1024


@dataclass(slots=True)
class Segment:
    """Consecutive packets that one clip can hold.

    * ``codec``: FFmpeg's name; ``extradata``: decoder configuration; ``width``, ``height``: 0 when unknown
    * ``end_reason``: why it ended, empty while it continues
    * ``cut``: its first packets were dropped
    * ``run``: number of the run of the camera's clock; a later run repeats times
    """

    codec: str
    extradata: bytes
    width: int = 0
    height: int = 0
    end_reason: str = ""
    cut: bool = False
    run: int = 0


@dataclass(frozen=True, slots=True)
class SegmentPacket:
    """One packet and its position.

    * ``time``: presentation time, camera microseconds; ``order``: decoding time, strictly increasing in a segment
    * ``at_s``: seconds of video before it over all segments; monotonic whatever the camera's clock does
    * ``starts``: decoding can start here; ``after_loss``: packets are missing before it
    """

    packet: EncodedPacket
    segment: Segment
    time: int
    order: int
    at_s: float
    starts: bool
    after_loss: bool


class Segmenter:
    """Assigns one camera's packets to segments. Not thread-safe."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._header = StreamHeader("", 0, 0, b"")
        self._sequence: int | None = None
        self._order: int | None = None
        self._newest: int | None = None
        self._given: int | None = None
        self._repeats = 0
        self._run = 0
        self._step = MICROSECONDS // 25
        self._at_s = 0.0
        self._sets = b""
        self._waiting = self._lost = False

    def open(self, header: StreamHeader) -> None:
        self._header = header
        self._sequence = None
        self.end("the connection to the camera was lost")

    def end(self, why: str) -> None:
        if self._segment is not None and not self._segment.end_reason:
            self._segment.end_reason = why
        self._segment = self._order = None
        self._sets = b""
        self._waiting, self._lost = True, False

    def assign(self, packet: EncodedPacket) -> SegmentPacket | None:
        """Assign a packet to a segment; ``None`` if it cannot be decoded or is a duplicate."""
        if not self._in_sequence(packet):
            return None
        if self._segment is not None and packet.codec != self._segment.codec:
            self._header = StreamHeader(packet.codec, 0, 0, b"")
            self.end("the camera changed its codec")
        order = self._ordered(packet)
        starts = packet.keyframe or starts_decoding(packet.codec, packet.data)
        if starts:
            self._configured(packet)
        elif self._waiting:
            return None
        if self._segment is None:
            self._segment = Segment(
                packet.codec,
                self._sets or self._header.extradata,
                self._header.width,
                self._header.height,
                run=self._run,
            )
        lost, self._waiting, self._lost = self._lost, False, False
        time = packet.pts if packet.pts is not None and self._repeats < PATIENCE else order
        return SegmentPacket(packet, self._segment, time, order, self._at_s, starts, lost)

    def _in_sequence(self, packet: EncodedPacket) -> bool:
        expected = self._sequence
        if expected is not None and expected - _LATE <= packet.sequence < expected:
            return False
        self._sequence = packet.sequence + 1
        if expected is not None and packet.sequence != expected:
            # Later packets depend on missing ones, until decoding can restart.
            self._waiting = self._lost = True
        return True

    def _ordered(self, packet: EncodedPacket) -> int:
        given, last = packet.decoding_time, self._order
        self._repeats = self._repeats + 1 if given is not None and given == self._given else 0
        self._given = given
        if self._repeats >= PATIENCE:
            # A stuck clock counts as missing, as it does for samples.
            given = None
        if last is not None and given is not None:
            ahead = given - last
            # After a loss, the next packet may be any time ahead.
            if ahead < -REPEAT or (ahead > LONGEST_STEP and not self._lost):
                self.end("the camera's clock was reset")
                last = None
        if given is None:
            given = self._step if last is None else last + self._step
        if last is not None:
            if given > last:
                self._step = min(given - last, MICROSECONDS)
            # A B-picture without a decoding time is displayed before the last one but decoded after it.
            given = max(given, last + 1)
            self._at_s += (given - last) / MICROSECONDS
        if self._newest is not None and given < self._newest - REPEAT:
            self._run += 1
        self._order = self._newest = given
        return given

    def _configured(self, packet: EncodedPacket) -> None:
        if packet.codec not in FRAMED_CODECS:
            return
        sizes, sets = parameter_sets(packet.codec, packet.data)
        if not sizes:
            # No sequence parameter sets: the picture size is unchanged.
            return
        if self._sets and sizes != parameter_sets(packet.codec, self._sets)[0]:
            order = self._order
            self._header = StreamHeader(packet.codec, 0, 0, b"")
            self.end("the camera changed its picture format")
            self._order = order
        self._sets = sets
