"""Codec processor (step 2): turns packets into samples with change grids. Decodes each packet once, except keyframes
that lazy decoding inspects (:mod:`cluster.codec.lazy_processor`) and packets redecoded after damage."""

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

# A sequence number up to this far back is a duplicate; further back, numbering has restarted.
_LATE = 1024
_MOST_AHEAD = 2**16
_STARTS = b"\0\0\1", b"\0\0\0\1"


@dataclass(frozen=True, slots=True)
class CodecOptions:
    """``fps``: samples per second. ``first_interval_s``: seconds between the first two anchors after a gap, None for
    ``anchor_interval_s``. ``masks``: privacy masks. ``zones``: regions outlined for the model.
    ``decoded_bytes``: memory limit for decoded pictures. ``decode``: device; "auto" uses a GPU if present."""

    fps: float = 2.0
    anchor_interval_s: float = 16.0
    first_interval_s: float | None = None
    masks: tuple[Polygon, ...] = ()
    zones: tuple[Polygon, ...] = ()
    decoded_bytes: int = DECODED_BYTES
    decode: DecodeWish = "cpu"


@dataclass(frozen=True, slots=True)
class FramedPacket:
    """A packet, its data in the decoder's framing, and whether other pictures may refer to it."""

    packet: EncodedPacket
    data: bytes
    reference: bool


class CodecProcessor:
    """Decoder, sampler and change grid of one camera. Used from one thread; never raises on bad packets.

    After a gap, damage, or joining mid-GOP, packets are skipped until the next keyframe. The sample that follows, like
    the one after a clock jump, is an anchor. It is *fresh*, the first of a scene, at the start of the stream, after a
    clock jump (back by more than a second, or ahead by more than 10 s with no video missing) and when the grid changes.
    Otherwise, also after a reconnect, it follows a *gap*: earlier content is still valid.

    With an ``nvdec`` session samples stay on the GPU (:meth:`pop_device_pictures`). Without one, or if the GPU rejects
    the stream, it is decoded on the CPU until reopened.
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
        self._anchors = AnchorRule(
            self.options.anchor_interval_s, self._sampling.period // 2, self.options.first_interval_s
        )
        self._order = ReferenceDistance()
        self._decoder: Decoder | None = None
        self._header = StreamHeader("", 0, 0, b"")
        self._trust = Trust.LOST
        self._suspect = False
        self._newest: deque[FramedPacket] = deque(maxlen=MOST_THREADS)
        # Whether the next sample is the first of a scene, and whether it follows missing video.
        self._fresh, self._gap = True, False
        self._next_sequence: int | None = None
        # Time of the last keyframe decoded by decode_keyframe_only.
        self._last_keyframe_only: int | None = None
        self._recovery_pts: int | None = None
        self._view: PictureView | None = None
        self._numbers = H264FrameNumbers()
        self._length_size = 0
        # Parameter sets and SEI from packets without a picture, which the decoder would report as damaged.
        self._ahead = b""

    # -- public interface -----------------------------------------------------------------------
    def open(self, header: StreamHeader) -> None:
        """Start, or restart after a reconnect; sequence numbers start over. Raises SourceError: unknown codec or
        damaged decoder configuration."""
        self.device.reset()
        self._configure(header)
        if header.new_clock:
            self._timeline.restart()
            self._fresh = True
        self._next_sequence = None
        self._mark_lost()

    def change_fps(self, fps: float) -> None:
        self._sampling.change_fps(fps)

    def feed(self, packet: EncodedPacket) -> list[SampledPicture]:
        """Decode one packet; returns completed samples, oldest first."""
        if not self._in_sequence(packet):
            return []
        data = self._framed(packet)
        if data is None or self._decoder is None:
            return []
        if packet.codec in FRAMED_CODECS:
            data = self._ahead + data
            pictures = (is_picture(packet.codec, kind) for kind, _ in typed_units(packet.codec, data))
            no_picture = data.startswith(_STARTS) and not any(pictures)
            self._ahead = data[-_MOST_AHEAD:] if no_picture else b""
            if no_picture:
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
        return [] if self._trust is Trust.LOST and not self._recover(each) else self._feed_now(each)

    def _feed_now(self, each: FramedPacket) -> list[SampledPicture]:
        assert self._decoder is not None
        self._newest.append(each)
        frames = self._decode(each)
        if frames is None and self._decoder.threads > 1:
            frames = self._decode_again()
        return self._accept_pictures(frames or [])

    def decode_keyframe_only(self, packet: EncodedPacket) -> list[SampledPicture]:
        """Cheap alternative to :meth:`feed`: decodes keyframes only, no more often than the sampling rate (in MJPEG
        every picture is a keyframe), and returns their samples without delay. The skipped packets are a gap to the next
        :meth:`feed`, but not counted as a fault."""
        time, last = packet.decoding_time, self._last_keyframe_only
        if packet.keyframe and (time is None or last is None or not 0 < time - last < self._sampling.least_step):
            self._last_keyframe_only = time
            return self.feed(packet) + self.drain()
        self._next_sequence = packet.sequence + 1
        if self._trust is not Trust.LOST:
            self._mark_lost()
        return []

    def drain(self) -> list[SampledPicture]:
        """Flush the decoder at the end of the video; returns the remaining samples."""
        if self._decoder is None or self._trust is Trust.LOST:
            return []
        samples: list[SampledPicture] = []
        try:
            samples = self._accept_pictures(self._decoder.drain())
        except (DecodeError, PicturesTooLargeError):
            self.stats.decode_errors += 1
        self._mark_lost()
        return samples

    def pop_device_pictures(self) -> list[DevicePicture]:
        """GPU samples completed by the last call, oldest first."""
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
        self._mark_lost()

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
            # Force a new view for the new stream, but keep the old grid: only a change of grid makes a new scene.
            self._view.width = self._view.height = 0
        self.stats.codec, self.stats.refusal = header.codec, ""

    def _new_decoder(self) -> Decoder:
        header, stats = self._header, self.stats
        self._suspect = False
        # Frees its NVDEC session for the new decoder.
        self._decoder = None
        return self.device.make_decoder(header, (header.width or stats.width, header.height or stats.height))

    def _in_sequence(self, packet: EncodedPacket) -> bool:
        expected = self._next_sequence
        if expected is not None and expected - _LATE <= packet.sequence < expected:
            return False
        self._next_sequence = packet.sequence + 1
        if expected is not None and packet.sequence != expected:
            self.stats.gaps += 1
            self.resync("gap")
        return True

    def _framed(self, packet: EncodedPacket) -> bytes | None:
        """The packet's data in the decoder's framing; None if it cannot be decoded."""
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
                # Start codes after all. Length prefixes are tried first: 256 to 511 looks like a start code.
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
            # After an error, flushing may not clear all of a decoder's state.
            self._decoder = self._new_decoder()
        elif self._decoder is not None:
            self._decoder.flush()
        self._newest.clear()
        self._trust = Trust.RECOVERING
        self._recovery_pts = packet.pts
        return True

    def _decode(self, each: FramedPacket) -> list[VideoFrame] | None:
        """Decode one packet; None if the decoder failed, in which case decoding resumes at the next keyframe."""
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
        # Outside the handler: the exception's traceback would keep the old decoder and its pictures alive.
        self._decoder = self._new_decoder()
        trim_heap()
        self.resync("too_large")
        return None

    def _decode_again(self) -> list[VideoFrame]:
        """Redecode from the newest keyframe of the last packets, if any: threads report damage some packets late."""
        newest = list(self._newest)
        for start in range(len(newest) - 1, 0, -1):
            if self._recover(newest[start]):
                frames: list[VideoFrame] = []
                for each in newest[start:]:
                    decoded = self._decode(each)
                    if decoded is None:
                        # Damaged again: showing the keyframe's picture would make later pictures trusted.
                        return []
                    frames += decoded
                return frames
        return []

    def _mark_lost(self) -> None:
        self._trust = Trust.LOST
        self._gap = True
        self._numbers.reset()
        self._order.reset()

    # -- pictures -------------------------------------------------------------------------------
    def _accept_pictures(self, frames: list[VideoFrame]) -> list[SampledPicture]:
        samples = []
        for frame in frames:
            self.stats.frames_decoded += 1
            sample = self._accept_picture(frame)
            if sample is not None:
                samples.append(sample)
            if self._trust is Trust.LOST:
                break
        return samples

    def _accept_picture(self, frame: VideoFrame) -> SampledPicture | None:
        if frame.is_corrupt:
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
                    self._mark_lost()
                    return None
            self._restart()
            self.stats.width, self.stats.height = size = frame.width, frame.height
            aspect = decoder.pixel_aspect
            grid = self._geometry.grid(max(1, round(frame.width * aspect)), frame.height)
            self._fresh = self._fresh or view is None or view.grid != grid
            self._view = view = PictureView(size, aspect, grid, self._masks, self.options.zones)
        pts = frame.pts if frame.pts is not None else frame.dts
        time = self._place(pts)
        past, future = self._order.scale_factors(pts)
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
        """Whether this is the first picture independent of anything before the recovery point.

        Leading pictures of an open GOP precede the keyframe in display order and refer to lost pictures. H.264 streams
        with gradual intra refresh have no keyframe; FFmpeg holds their pictures back until the refresh is complete.
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
        time = self._timeline.place_picture(pts)
        if self._timeline.jumped:
            self.stats.resyncs["timestamps"] += 1
            # The picture's references are intact: only the clock is discontinuous.
            self._fresh = True
            self._restart()
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
            # FFmpeg decodes some sizes and formats that it cannot scale.
            self.stats.decode_errors += 1
            self.resync("corrupt")
            return None
        change = view.change.pop_change(luma)
        self.stats.cue = change.cue
        return SampledPicture(rgb=rgb, luma=luma, change=change, **self._header_of_sample(time, view))

    def _header_of_sample(self, time: int, view: PictureView) -> dict[str, Any]:
        """Fields of the next sample's :class:`~cluster.types.PictureHeader`; counts the sample."""
        header: dict[str, Any] = {
            "index": self.stats.frames_sampled,
            "pts": time,
            "anchor": self._anchors.is_anchor(time),
            "fresh": self._fresh,
            "grid": view.grid,
            "hidden": view.hidden,
            "gap": self._gap and not self._fresh,
        }
        self.stats.frames_sampled += 1
        self._fresh = self._gap = False
        return header
