"""The part of a codec processor that leaves quiet packets undecoded (see :mod:`cluster.codec.lazy`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import av
from av.video.frame import VideoFrame

from cluster.codec.decoder import DecodeError, Decoder, PicturesTooLargeError
from cluster.codec.lazy import HeldPacket, LazyDecode
from cluster.codec.motion import ReferenceDistance
from cluster.codec.privacy import PrivacyMasks
from cluster.codec.stream_state import CodecStats, PictureView, Trust, no_change
from cluster.codec.timeline import Sampling
from cluster.types import SampledPicture

ShowsChange = Callable[[SampledPicture], bool]
"""Whether the pruner would find change in a picture; leaves its state as it is."""


class LazyFeed(ABC):
    """Holds packets in place of decoding them, and gives samples at their times: the newest decoded picture again.

    Held packets are decoded before the first in which something happens; the change of all of them is then part of the
    next sample. Those held when a keyframe comes are dropped, and decoding begins anew there without a gap. Where
    samples wait for the keyframe, a second decoder looks at it first; if it shows change, nothing is dropped and
    every sample is what it would have been.
    """

    stats: CodecStats
    _trust: Trust
    _order: ReferenceDistance
    _sampling: Sampling
    _view: PictureView | None
    _masks: PrivacyMasks

    def _begin_lazily(self, lazy: LazyDecode | None, changes: ShowsChange | None) -> None:
        self.lazy, self._changes = lazy, changes
        self._witness: Decoder | None = None
        # The newest sample, a newer picture that was none, up to when held pictures have been sampled, and up to when
        # pictures must have been shown before packets are held.
        self._last_sample: SampledPicture | None = None
        self._unsampled: VideoFrame | None = None
        self._sampled_until: int | None = None
        self._must_show: int | None = None

    def change_lazy_wait(self, wait_s: float) -> None:
        """Between two packets; see LazyDecode."""
        if self.lazy is not None:
            self.lazy.wait_s = 0.0 if self._changes is None else wait_s

    def label(self, sample: SampledPicture, *, changed: bool) -> None:
        """What the pruner found in a sample, before the next packet is fed."""
        if self.lazy is not None and not sample.repeated:
            self.lazy.label(changed)

    def _feed_lazily(self, each: HeldPacket, lazy: LazyDecode, hold: bool) -> list[SampledPicture]:
        """Hold the packet; or drop those held before a keyframe, or decode them, and then this one."""
        if hold and (lazy.holding or (self._must_show is None and self._last_sample is not None)):
            return self._repeat(lazy.hold(each))
        samples: list[SampledPicture] = []
        changed = lazy.restarts and lazy.unsure and self._shows_change(each)
        lazy.events["found"] += changed
        if lazy.holding and lazy.restarts and not changed:
            samples = self._skip_held(lazy)
            lost = self._trust is Trust.LOST
            if self._recover(each) and not lost:
                self._trust = Trust.SKIPPED
                self._order.reset()
                self._sampled_until = None
        samples += self._decode_held(lazy)
        if self._trust is Trust.LOST:
            return samples
        if lazy.told and each.packet.pts is not None:
            self._must_show = max(self._must_show or 0, each.packet.pts)
        return samples + self._feed_now(each)

    def _decode_held(self, lazy: LazyDecode) -> list[SampledPicture]:
        samples: list[SampledPicture] = []
        for each in lazy.release():
            samples += self._feed_now(each)
            if self._trust is Trust.LOST:
                break
        return samples

    def _follow_clock_back(self, lazy: LazyDecode) -> list[SampledPicture]:
        """The camera's clock was set back or stands still: sampled times come again, as those of others."""
        samples = self._decode_held(lazy)
        self._sampled_until = self._must_show = None
        return samples

    def _shows_change(self, each: HeldPacket) -> bool:
        """Whether the pruner finds change in a keyframe, decoded apart; True where it cannot be told."""
        view, last = self._view, self._last_sample
        if self._changes is None or view is None or last is None:
            return True
        try:
            if self._witness is None:
                self._witness = self._new_witness()
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
        """Samples at the times of pictures that are left undecoded: the newest decoded one again."""
        samples = []
        for pts in times:
            self._sampled_until = max(self._sampled_until or pts, pts)
            time = self._place(pts)
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

    def _skip_held(self, lazy: LazyDecode) -> list[SampledPicture]:
        """Drop what is held; samples at the rest of its times."""
        samples = self._repeat(lazy.skip())
        self.stats.frames_spared = lazy.spared
        return samples

    def _end_held(self) -> list[SampledPicture]:
        """At the end of the video: as at a keyframe, or all of it decoded where no keyframe can be waited for."""
        if self.lazy is None:
            return []
        return self._decode_held(self.lazy) if self.lazy.unsure else self._skip_held(self.lazy)

    def _lose_held(self) -> None:
        """Decoding is to begin anew after a loss."""
        if self.lazy is not None:
            self.stats.packets_skipped += self.lazy.holding
            self.lazy.clear()
        self._last_sample = self._unsampled = self._sampled_until = self._must_show = None

    def _is_repeated(self, pts: int | None) -> bool:
        """Whether the time of a picture has been sampled while it was held."""
        return self._sampled_until is not None and pts is not None and pts <= self._sampled_until

    def _note_shown(self, frame: VideoFrame, pts: int | None) -> None:
        """A picture came out of the decoder."""
        self._unsampled = frame
        if self._must_show is not None and (pts is None or pts >= self._must_show):
            self._must_show = None

    # -- the processor's ------------------------------------------------------------------------
    @abstractmethod
    def _feed_now(self, each: HeldPacket) -> list[SampledPicture]: ...

    @abstractmethod
    def _new_witness(self) -> Decoder: ...

    @abstractmethod
    def _recover(self, each: HeldPacket) -> bool: ...

    @abstractmethod
    def _place(self, pts: int | None) -> int | None: ...

    @abstractmethod
    def _sample(self, frame: VideoFrame, time: int, view: PictureView) -> SampledPicture | None: ...

    @abstractmethod
    def _header_of_sample(self, time: int, view: PictureView) -> dict[str, Any]: ...
