"""Codec processor (step 2): packets in, samples with their change grids out. No packet is decoded twice, but for
keyframes that are a witness (see :mod:`cluster.codec.lazy_processor`)."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import av
from av.video.frame import PictureType, VideoFrame

from cluster.codec.decoder import DECODED_BYTES, MOST_THREADS, DecodeError, Decoder, PicturesTooLargeError, trim_heap
from cluster.codec.motion import ReferenceDistance
from cluster.codec.nal import (
    FRAMED_CODECS,
    H264FrameNumbers,
    configuration,
    is_picture,
    starts_decoding,
    to_annexb,
    typed_units,
)
from cluster.codec.nvdec import DecodeDevice, DecodeWish, DevicePicture, Nvdec
from cluster.codec.privacy import Polygon, PrivacyMasks
from cluster.codec.source import StreamHeader
from cluster.codec.stream_state import CodecStats, PictureView, Trust
from cluster.codec.timeline import AnchorRule, Sampling, Timeline
from cluster.errors import SourceError
from cluster.types import EncodedPacket, PatchGeometry, SampledPicture

# A sequence number this far back is a late repeat; further back the count has started anew.
_LATE = 1024
_MOST_AHEAD = 2**16
_STARTS = b"\0\0\1", b"\0\0\0\1"


@dataclass(frozen=True, slots=True)
class CodecOptions:
    """``fps``: samples per second. ``masks``: privacy masks. ``zones``: outlined for the model. ``decoded_bytes``:
    memory limit for decoded pictures. ``decode``: on which device; "auto" takes a GPU if there is one."""

    fps: float = 2.0
    anchor_interval_s: float = 16.0
    masks: tuple[Polygon, ...] = ()
    zones: tuple[Polygon, ...] = ()
    decoded_bytes: int = DECODED_BYTES
    decode: DecodeWish = "cpu"


@dataclass(frozen=True, slots=True)
class FramedPacket:
    """A packet with its data in the decoder's framing, and whether others may refer to it."""

    packet: EncodedPacket
    data: bytes
    reference: bool


class CodecProcessor:
    """Decoder, sampler and change grid of one camera. One thread; never raises on bad packets.

    After a gap, damage, or a join in mid-GOP, packets are skipped until the next keyframe. The next sample, and that
    after a clock jump, is an anchor. It is *fresh*, the first of a scene, where the stream begins, the clock jumped
    (back by more than a second, or ahead by more than 10 s with no video missing) or the grid changed. Otherwise it
    follows a *gap*, also after a reconnect: earlier content is still valid.

    With a session of ``nvdec`` samples stay on the GPU (:meth:`pop_device_pictures`). Where there is none, or the GPU
    refuses the stream, the CPU decodes it until it is opened again.
    """

    def __init__(
        self, geometry: PatchGeometry, options: CodecOptions | None = None, nvdec: Nvdec | None = None
    ) -> None:
        self.options = options or CodecOptions()
        self.device = DecodeDevice(self.options.decode, nvdec, self.options.decoded_bytes)
        self._device_pictures: list[DevicePicture] = []
        self.stats = CodecStats()
        self._geometry = geometry
        self._masks = PrivacyMasks(self.options.masks)
        self._timeline = Timeline()
        self._sampling = Sampling(self.options.fps)
        self._anchors = AnchorRule(self.options.anchor_interval_s, self._sampling.period // 2)
        self._order = ReferenceDistance()
        self._decoder: Decoder | None = None
        self._header = StreamHeader("", 0, 0, b"")
        self._trust = Trust.LOST
        self._suspect = False
        self._newest: deque[FramedPacket] = deque(maxlen=MOST_THREADS)
        # What the next sample is told to be: the first of a scene, or one after missing video.
        self._fresh, self._gap = True, False
        self._next_sequence: int | None = None
        # Time of the newest keyframe that was decoded alone.
        self._alone: int | None = None
        self._recovery_pts: int | None = None
        self._view: PictureView | None = None
        self._numbers = H264FrameNumbers()
        self._length_size = 0
        # Parameter sets and SEI that came by themselves: without a picture, which a decoder would take for damage.
        self._ahead = b""

    # -- the caller's side ----------------------------------------------------------------------
    def open(self, header: StreamHeader) -> None:
        """Start, or restart after a reconnect; sequence numbers count anew. Raises SourceError: the codec is unknown,
        or its configuration is damaged."""
        self.device.reset()
        self._configure(header)
        if header.new_clock:
            self._timeline.restart()
            self._fresh = True
        self._next_sequence = None
        self._lose()

    def change_fps(self, fps: float) -> None:
        self._sampling.change_fps(fps)

    def feed(self, packet: EncodedPacket) -> list[SampledPicture]:
        """Decode one packet; returns completed samples, oldest first."""
        self.stats.packets += 1
        if not self._in_sequence(packet):
            return []
        data = self._framed(packet)
        if data is None or self._decoder is None:
            return []
        if packet.codec in FRAMED_CODECS:
            data = self._ahead + data
            pictures = (is_picture(packet.codec, kind) for kind, _ in typed_units(packet.codec, data))
            alone = data.startswith(_STARTS) and not any(pictures)
            self._ahead = data[-_MOST_AHEAD:] if alone else b""
            if alone:
                return []
        reference = True
        if packet.codec == "h264":
            head = self._numbers.inspect(data)
            reference = head.reference
            if head.lost and self._trust is not Trust.LOST:
                self.stats.gaps += 1
                self.resync("lost_reference")
        return self._feed_framed(FramedPacket(packet, data, reference))

    def _feed_framed(self, each: FramedPacket) -> list[SampledPicture]:
        if self._trust is Trust.LOST and not self._recover(each):
            self.stats.packets_skipped += 1
            return []
        return self._feed_now(each)

    def _feed_now(self, each: FramedPacket) -> list[SampledPicture]:
        assert self._decoder is not None
        self._newest.append(each)
        frames = self._decode(each)
        if frames is None and self._decoder.threads > 1:
            frames = self._decode_again()
        return self._show(frames or [])

    def decode_keyframe_only(self, packet: EncodedPacket) -> list[SampledPicture]:
        """Cheap alternative to :meth:`feed`: decodes only keyframes, each shown at once, and at most as many as samples
        are wanted: in MJPEG every picture is one. The next packet fed follows a loss that is not counted as a video
        fault."""
        time, last = packet.decoding_time, self._alone
        if packet.keyframe and (time is None or last is None or not 0 < time - last < self._sampling.least_step):
            self._alone = time
            return self.feed(packet) + self.drain()
        self.stats.packets += 1
        self.stats.packets_skipped += 1
        self._next_sequence = packet.sequence + 1
        if self._trust is not Trust.LOST:
            self._lose()
        return []

    def drain(self) -> list[SampledPicture]:
        """Samples among the pictures still held back, at the end of the video."""
        if self._decoder is None or self._trust is Trust.LOST:
            return []
        samples: list[SampledPicture] = []
        try:
            samples = self._show(self._decoder.drain())
        except (DecodeError, PicturesTooLargeError):
            self.stats.decode_errors += 1
        self._lose()
        return samples

    def pop_device_pictures(self) -> list[DevicePicture]:
        """Samples on the GPU that the last call completed, oldest first."""
        pictures, self._device_pictures = self._device_pictures, []
        return pictures

    def leave_device(self, reason: str) -> None:
        """Decode on the CPU from the next keyframe on."""
        self.device.leave(reason)
        self._decoder = self._new_decoder()
        self.resync("device")

    def resync(self, reason: str) -> None:
        """Skip to the next keyframe, counted under ``reason``."""
        self.stats.resyncs[reason] += 1
        self._lose()

    # -- packets --------------------------------------------------------------------------------
    def _configure(self, header: StreamHeader) -> None:
        try:
            found = configuration(header.codec, header.extradata)
        except ValueError as error:
            raise SourceError(str(error), retryable=False) from None
        self._length_size, self._ahead = found.length_size, b""
        self._header = StreamHeader(header.codec, header.width, header.height, found.parameter_sets)
        self._decoder = self._new_decoder()
        self._numbers = H264FrameNumbers(found.parameter_sets if header.codec == "h264" else b"")
        if self._view is not None:
            # Its grid is the scene's, whatever codec and size show it from here on.
            self._view.width = self._view.height = 0
        self.stats.codec, self.stats.refusal = header.codec, ""

    def _new_decoder(self) -> Decoder:
        header, stats = self._header, self.stats
        self._suspect = False
        # Its session is the next one's.
        self._decoder = None
        return self.device.make_decoder(header, (header.width or stats.width, header.height or stats.height))

    def _in_sequence(self, packet: EncodedPacket) -> bool:
        expected = self._next_sequence
        if expected is not None and expected - _LATE <= packet.sequence < expected:
            self.stats.packets_repeated += 1
            return False
        self._next_sequence = packet.sequence + 1
        if expected is not None and packet.sequence != expected:
            self.stats.gaps += 1
            self.resync("gap")
        return True

    def _framed(self, packet: EncodedPacket) -> bytes | None:
        """The packet's data in the decoder's framing; None if there is nothing to decode."""
        if packet.codec != self._header.codec:
            self.resync("codec")
            try:
                self._configure(StreamHeader(packet.codec, 0, 0, b""))
            except SourceError:
                self._decoder = None
                return None
        data = packet.data
        if self._length_size and packet.codec in FRAMED_CODECS:
            try:
                data = to_annexb(data, self._length_size)
            except ValueError:
                # Start codes after all. Lengths come first, since those of 256 to 511 bytes look like one.
                data = data if data.startswith(_STARTS) else b""
        if not data:
            self.stats.decode_errors += 1
            self.resync("corrupt")
            return None
        return data

    def _recover(self, each: FramedPacket) -> bool:
        packet, data = each.packet, each.data
        if not packet.keyframe and not starts_decoding(packet.codec, data):
            return False
        if self._suspect:
            # A decoder that raised may have kept more than flushing clears.
            self._decoder = self._new_decoder()
        elif self._decoder is not None:
            self._decoder.flush()
        self._newest.clear()
        self._trust = Trust.RECOVERING
        self._recovery_pts = packet.pts
        return True

    def _decode(self, each: FramedPacket) -> list[VideoFrame] | None:
        """None if the decoder failed; decoding then resumes at the next keyframe."""
        assert self._decoder is not None
        packet, data = each.packet, each.data
        self._order.record_decoded(packet.pts, each.reference)
        try:
            return self._decoder.decode(data, packet.pts, packet.dts, discard=packet.discard)
        except PicturesTooLargeError as error:
            self.stats.refusal = str(error)
        except DecodeError:
            refused = self.device.decode_refused(self._decoder, packet, data, self._header)
            if refused is not None:
                self._decoder, frames = refused
                return frames
            self.stats.decode_errors += 1
            self._suspect = True
            self.resync("corrupt")
            return None
        # The error is gone here, and with it the last that keeps the old decoder and its pictures.
        self._decoder = self._new_decoder()
        trim_heap()
        self.resync("too_large")
        return None

    def _decode_again(self) -> list[VideoFrame]:
        """Threads report damage some packets late: decode again from the newest keyframe since, if there is one."""
        newest = list(self._newest)
        for start in range(len(newest) - 1, 0, -1):
            if self._recover(newest[start]):
                frames: list[VideoFrame] = []
                for each in newest[start:]:
                    decoded = self._decode(each)
                    if decoded is None:
                        # Damaged here too: with the keyframe's picture shown, what follows would be trusted.
                        return []
                    frames += decoded
                return frames
        return []

    def _lose(self) -> None:
        self._trust = Trust.LOST
        self._gap = True
        self._numbers.reset()
        self._order.reset()

    # -- pictures -------------------------------------------------------------------------------
    def _show(self, frames: list[VideoFrame]) -> list[SampledPicture]:
        samples = []
        for frame in frames:
            self.stats.frames_decoded += 1
            sample = self._shown(frame)
            if sample is not None:
                samples.append(sample)
            if self._trust is Trust.LOST:
                break
        return samples

    def _shown(self, frame: VideoFrame) -> SampledPicture | None:
        if frame.is_corrupt:
            self.stats.corrupt_frames += 1
            self.resync("corrupt")
            return None
        if (self._trust is not Trust.TRUSTED and not self._trustworthy(frame)) or frame.opaque:
            return None
        view, decoder = self._view, self._decoder
        assert decoder is not None
        if (
            view is None
            or (frame.width, frame.height) != (view.width, view.height)
            or (frame.key_frame and decoder.pixel_aspect != view.aspect)
        ):
            if view is not None and not (self._fresh or self._gap):
                self.stats.resyncs["resolution"] += 1
                if not frame.key_frame:
                    self._lose()
                    return None
            self._restart()
            self.stats.width, self.stats.height = size = frame.width, frame.height
            aspect = decoder.pixel_aspect
            grid = self._geometry.grid(max(1, round(frame.width * aspect)), frame.height)
            self._fresh = self._fresh or view is None or view.grid != grid
            self._view = view = PictureView(size, aspect, grid, self._masks, self.options.zones)
        pts = frame.pts if frame.pts is not None else frame.dts
        time = self._place(pts)
        past, future = self._order.scale_factors(pts, decoder.reorders)
        if self.device.name == "cpu":
            self._add_change(frame, view, past, future)
        if frame.pict_type == PictureType.I or frame.key_frame:
            self._anchors.note_intra_picture(time)
        if time is None:
            return None
        return self._sample(frame, time, view) if self._sampling.is_sample(time) else None

    def _add_change(self, frame: VideoFrame, view: PictureView, past: float, future: float) -> None:
        view.change.add_picture(frame, past, future)

    def _trustworthy(self, frame: VideoFrame) -> bool:
        """Whether this is the first picture that depends on nothing before the recovery.

        Leading pictures of an open GOP are shown before the keyframe and refer to what was lost. H.264 streams with
        gradual refresh have no keyframe; FFmpeg holds their pictures back until they are whole.
        """
        gradual = (
            self._header.codec == "h264"
            and frame.pts is not None
            and self._recovery_pts is not None
            and frame.pts > self._recovery_pts
        )
        if not frame.key_frame and not gradual:
            return False
        skipped, self._trust = self._trust is Trust.SKIPPED, Trust.TRUSTED
        self.stats.refusal = ""
        if not skipped:
            self._restart()
        return True

    def _restart(self) -> None:
        self._gap = True
        self._timeline.resume()
        self._sampling.reset()
        self._anchors.reset()
        if self._view is not None:
            self._view.change.reset()

    def _place(self, pts: int | None) -> int | None:
        timeline, stats = self._timeline, self.stats
        time = timeline.place_picture(pts)
        if timeline.jumped:
            stats.resyncs["timestamps"] += 1
            # Its references are there: nothing is missing but the time between.
            self._fresh = True
            self._restart()
        stats.pts_missing, stats.pts_repeated, stats.pts_jumps = timeline.missing, timeline.repeated, timeline.jumps
        return time

    def _sample(self, frame: VideoFrame, time: int, view: PictureView) -> SampledPicture | None:
        if self.device.name != "cpu":
            self.stats.cue = "luma"
            picture = DevicePicture(
                frame=frame,
                codec=self.stats.codec,
                masked=view.masked,
                outlines=view.outlines,
                **self._header_of_sample(time, view),
            )
            self._device_pictures.append(picture)
            return None
        if self._fresh or self._gap:
            view.change.reset()
        try:
            rgb, luma = view.scaler(self._masks.apply(frame))
            rgb = rgb if view.outlines is None else view.outlines.draw(rgb)
        except (av.FFmpegError, ValueError, MemoryError):
            # A picture of a shape or format that FFmpeg decodes but cannot scale.
            self.stats.decode_errors += 1
            self.resync("corrupt")
            return None
        change = view.change.pop_change(luma)
        self.stats.cue = change.cue
        return SampledPicture(rgb=rgb, luma=luma, change=change, **self._header_of_sample(time, view))

    def _header_of_sample(self, time: int, view: PictureView) -> dict[str, Any]:
        """Fields of the next sample's :class:`~cluster.types.PictureHeader`; counts it."""
        header: dict[str, Any] = {
            "index": self.stats.frames_sampled,
            "pts": time,
            "anchor": self._anchors.is_anchor(time),
            "fresh": self._fresh,
            "grid": view.grid,
            "hidden": view.hidden,
            "gap": self._gap and not self._fresh,
        }
        self.stats.scenes += self._fresh
        self.stats.anchors += header["anchor"]
        self.stats.frames_sampled += 1
        self._fresh = self._gap = False
        return header
