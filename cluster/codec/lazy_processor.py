"""Codec processor that leaves quiet packets undecoded (see :mod:`cluster.codec.lazy`)."""

from collections.abc import Callable
from dataclasses import replace

import av
from av.video.frame import VideoFrame

from cluster.codec.decoder import DecodeError, Decoder, PicturesTooLargeError
from cluster.codec.lazy import LazyDecode
from cluster.codec.nvdec import Nvdec
from cluster.codec.processor import CodecOptions, CodecProcessor, FramedPacket
from cluster.codec.source import StreamHeader
from cluster.codec.stream_state import PictureView, Trust, no_change
from cluster.types import PatchGeometry, SampledPicture


class LazyProcessor(CodecProcessor):
    """Holds quiet H.264 and HEVC packets instead of decoding them on the CPU; samples at their times repeat the last
    decoded picture.

    Held packets are decoded before the next active one, and their change becomes part of the next sample. Packets still
    held at a keyframe are dropped, and decoding resumes there without a gap. If their samples wait for the keyframe, a
    second decoder inspects it first; if it shows change, nothing is dropped and all samples are as without lazy
    decoding.
    """

    def __init__(
        self,
        geometry: PatchGeometry,
        changes: Callable[[SampledPicture], bool],
        options: CodecOptions | None = None,
        nvdec: Nvdec | None = None,
    ) -> None:
        """``changes``: whether the pruner finds change in a picture; must not alter the pruner's state."""
        super().__init__(geometry, options, nvdec)
        self.lazy = LazyDecode()
        self._changes = changes
        self._witness: Decoder | None = None
        # The newest sample, the newest picture since that was not sampled, the time up to which held pictures have been
        # sampled, and the time that decoding has to show before packets may be held.
        self._last_sample: SampledPicture | None = None
        self._unsampled: VideoFrame | None = None
        self._sampled_until: int | None = None
        self._must_show: int | None = None

    def drain(self) -> list[SampledPicture]:
        # As at a keyframe; but packets in doubt are decoded, as no keyframe will follow.
        samples = self._decode_held() if self.lazy.unsure else self._skip_held()
        return samples + super().drain()

    def _feed_framed(self, each: FramedPacket) -> list[SampledPicture]:
        if self.device.name != "cpu":
            return super()._feed_framed(each)
        hold = self.lazy.holds(each)
        samples: list[SampledPicture] = []
        if self.lazy.set_back:
            # The camera's clock was set back or stands still: sampled times recur with other pictures.
            samples = self._decode_held()
            self._sampled_until = self._must_show = None
        if self._trust is Trust.LOST:
            return samples + super()._feed_framed(each)
        return samples + self._feed_lazily(each, hold)

    def _feed_lazily(self, each: FramedPacket, hold: bool) -> list[SampledPicture]:
        """Hold the packet, or decode it after dropping (at a keyframe) or decoding the held ones."""
        lazy = self.lazy
        if hold and (lazy.holding or (self._must_show is None and self._last_sample is not None)):
            return self._repeat(lazy.hold(each))
        samples: list[SampledPicture] = []
        changed = lazy.keyframe and lazy.unsure and self._shows_change(each)
        lazy.events["found"] += changed
        if lazy.holding and lazy.keyframe and not changed:
            samples = self._skip_held()
            lost = self._trust is Trust.LOST
            if self._recover(each) and not lost:
                self._trust = Trust.SKIPPED
                self._order.reset()
                self._sampled_until = None
        samples += self._decode_held()
        if self._trust is Trust.LOST:
            return samples
        if lazy.active and each.packet.pts is not None:
            self._must_show = max(self._must_show or 0, each.packet.pts)
        return samples + self._feed_now(each)

    def _decode_held(self) -> list[SampledPicture]:
        samples: list[SampledPicture] = []
        for each in self.lazy.release():
            samples += self._feed_now(each)
            if self._trust is Trust.LOST:
                break
        return samples

    def _shows_change(self, each: FramedPacket) -> bool:
        """Whether the pruner finds change in a keyframe, decoded separately; True if unknown."""
        view, last = self._view, self._last_sample
        if view is None or last is None:
            return True
        try:
            if self._witness is None:
                header, limit = self._header, self.options.decoded_bytes
                self._witness = Decoder(header.codec, header.extradata, limit, (header.width, header.height))
            frames = self._witness.decode(each.data, each.packet.pts, each.packet.dts) + self._witness.drain()
            if (
                len(frames) != 1
                or frames[0].is_corrupt
                or (frames[0].width, frames[0].height) != (view.width, view.height)
            ):
                return True
            rgb, luma = view.scaler(self._masks.apply(frames[0]))
        except (DecodeError, PicturesTooLargeError, av.FFmpegError, ValueError, MemoryError):
            self._witness = None
            return True
        still = no_change(view.grid, last.change.cue)
        return self._changes(replace(last, rgb=rgb, luma=luma, change=still, anchor=False, fresh=False, gap=False))

    def _repeat(self, times: list[int]) -> list[SampledPicture]:
        """Samples at the times of undecoded pictures, repeating the last decoded one."""
        samples = []
        for pts in times:
            self._sampled_until = max(self._sampled_until or pts, pts)
            time = super()._place(pts)
            if time is None:
                continue
            view, last = self._view, self._last_sample
            if view is None or last is None or not self._sampling.is_sample(time):
                continue
            if self._unsampled is not None:
                sample = self._sample(self._unsampled, time, view)
            else:
                header = self._header_of_sample(time, view)
                sample = replace(last, change=no_change(view.grid, last.change.cue), repeated=True, **header)
            if sample is not None:
                samples.append(sample)
        return samples

    def _skip_held(self) -> list[SampledPicture]:
        """Drop the held packets; returns samples at their remaining times."""
        samples = self._repeat(self.lazy.skip())
        self.stats.frames_spared = self.lazy.spared
        return samples

    # -- overridden steps of CodecProcessor -----------------------------------------------------
    def _configure(self, header: StreamHeader) -> None:
        super()._configure(header)
        self._witness = None
        self.lazy.open(self._header.codec, self._header.extradata)

    def _mark_lost(self) -> None:
        super()._mark_lost()
        self.lazy.clear()
        self._last_sample = self._unsampled = self._sampled_until = self._must_show = None

    def _place(self, pts: int | None) -> int | None:
        # A picture's time may have been sampled already while its packet was held.
        repeated = self._sampled_until is not None and pts is not None and pts <= self._sampled_until
        return None if repeated else super()._place(pts)

    def _add_change(self, frame: VideoFrame, view: PictureView, past: float, future: float) -> None:
        super()._add_change(frame, view, past, future)
        self.lazy.learn_from((self.stats.codec, view.width, view.height))
        self._unsampled = frame
        pts = frame.pts if frame.pts is not None else frame.dts
        if self._must_show is not None and (pts is None or pts >= self._must_show):
            self._must_show = None

    def _sample(self, frame: VideoFrame, time: int, view: PictureView) -> SampledPicture | None:
        sample = super()._sample(frame, time, view)
        if sample is not None:
            self._last_sample, self._unsampled = sample, None
        return sample
