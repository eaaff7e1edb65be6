"""Opens a source for a few seconds as a camera would, and reports what it sends."""

import asyncio
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from cluster.codec import CameraState
from cluster.config import CameraConfig, SightlineConfig, camera_settings
from cluster.config.load import parse_camera
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.pipeline import CameraPipeline, make_source, pipeline_settings
from cluster.errors import ConfigError, NotReadyError
from cluster.security.limits import ConcurrencyLimit
from cluster.types import MICROSECONDS, BoolGrid, EncodedPacket, FrameSample, PatchGeometry, ShownPicture
from cluster.types.cameras import SourceTest
from cluster.vision.sampler import Cut

LONGEST_S = 8.0
"""Duration of a test in seconds, beyond the time to connect: two GOPs of most cameras."""
MOST_CONNECT_S = 10.0
SAMPLES = 4
"""Samples after the first anchor from which the cue is judged."""
POLL_S = 0.05
STOP_S = 5.0
MOST_AT_ONCE = 2
MOST_TIMES = 4096

USUAL_GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
"""Patch geometry assumed until a replica has reported its model's."""


@dataclass(slots=True)
class PacketTimes:
    """Times, sizes and keyframes of a source's first :data:`MOST_TIMES` packets."""

    times: list[int] = field(default_factory=list)
    keyframes: list[int] = field(default_factory=list)
    bytes: int = 0

    def add(self, packet: EncodedPacket) -> None:
        if packet.pts is None or len(self.times) >= MOST_TIMES:
            return
        if packet.keyframe:
            self.keyframes.append(len(self.times))
        self.times.append(packet.pts)
        self.bytes += len(packet.data)

    @property
    def seconds(self) -> float:
        """From the first displayed picture to the last."""
        return (max(self.times) - min(self.times)) / MICROSECONDS if len(self.times) > 1 else 0.0

    @property
    def fps(self) -> float:
        """Pictures per second by the median step, since reordering leaves holes at the end; 0 for fewer than two."""
        shown = sorted(set(self.times))
        return MICROSECONDS / median(after - before for before, after in pairwise(shown)) if len(shown) > 1 else 0.0

    @property
    def gop(self) -> tuple[int, float]:
        """Mean distance between keyframes, in pictures and seconds; zeros for fewer than two keyframes."""
        if len(self.keyframes) < 2:
            return 0, 0.0
        first, last, count = self.keyframes[0], self.keyframes[-1], len(self.keyframes) - 1
        return round((last - first) / count), (self.times[last] - self.times[first]) / MICROSECONDS / count

    @property
    def kbit_s(self) -> float:
        return self.bytes * 8 / 1000 / self.seconds if self.seconds else 0.0


class _TestFootage(CameraFootage):
    """Records packet times and the picture to show; ``first``: set at the first picture."""

    def __init__(self) -> None:
        super().__init__()
        self.times = PacketTimes()
        self.first = threading.Event()

    def add_packet(self, packet: EncodedPacket) -> None:
        self.times.add(packet)

    def show(self, picture: ShownPicture, mask: BoolGrid, at_s: float) -> None:
        # Prefer a pruned picture: anchors keep every patch and do not show the effect of the cue.
        if not self.first.is_set() or not mask.all():
            self.latest.show(picture, mask, at_s)
        self.first.set()


def watch_source(camera: CameraConfig, config: SightlineConfig, geometry: PatchGeometry) -> SourceTest:
    """Run the camera's pipeline on its source until two keyframes and enough samples have arrived; blocks.

    ``config``: allowed files, and redirects. Raises ``ConfigError``: the camera is pushed, or its source cannot be
    opened here; ``NotReadyError``: the source sends no picture, with the reason.
    """
    if camera.is_pushed:
        raise ConfigError(f"camera {camera.name!r} has no source to test: an agent pushes its packets")
    watched, samples = _TestFootage(), [0, 0, 0]
    times, first = watched.times, watched.first

    def send(sample: FrameSample, _cut: Cut) -> None:
        if not sample.anchor:
            samples[0] += 1
            samples[1] += sample.grid.tokens
            samples[2] += sample.tokens

    pipeline = CameraPipeline(
        camera.name, make_source(camera, config), geometry, pipeline_settings(camera), send, footage=watched
    )
    began_s = time.monotonic()
    connect_s = 0.0 if camera.is_file else min(camera.source_options.connect_timeout_s, MOST_CONNECT_S)
    first_s = 0.0
    pipeline.start()
    try:
        while time.monotonic() - began_s < connect_s + LONGEST_S:
            ended = not pipeline.running
            if first.is_set() and not first_s:
                first_s = time.monotonic() - began_s
            if pipeline.status().state is CameraState.BACKOFF or ended:
                break
            if samples[0] >= SAMPLES and len(times.keyframes) >= 2:
                break
            time.sleep(POLL_S)
        status = pipeline.status()
    finally:
        pipeline.stop(STOP_S)
    if not first.is_set():
        reason = status.reason or f"no picture within {connect_s + LONGEST_S:g} s"
        raise NotReadyError(f"{camera.source} gives no picture: {reason}")
    plain, kept = watched.latest.render(), watched.latest.render(kept=True)
    pictures, gop_s = times.gop
    return SourceTest(
        codec=status.stats.codec,
        width=status.stats.width,
        height=status.stats.height,
        fps=times.fps,
        gop_pictures=pictures,
        gop_s=gop_s,
        kbit_s=times.kbit_s,
        cue=status.stats.cue,
        decode=status.decode,
        first_picture_s=first_s or time.monotonic() - began_s,
        decode_errors=status.stats.decode_errors,
        kept=samples[2] / samples[1] if samples[1] else 0.0,
        jpeg=plain.jpeg,
        kept_jpeg=kept.jpeg,
    )


class SourceTester:
    """Runs a process's source tests, at most :data:`MOST_AT_ONCE` at a time."""

    def __init__(self, config: SightlineConfig) -> None:
        self._config = config
        self._places = ConcurrencyLimit(MOST_AT_ONCE, "sources are being tested already; try again in a moment")
        self.geometry: PatchGeometry | None = None
        """The model's patch geometry; None until a replica has reported it."""

    async def test(self, name: str, source: str, settings: dict[str, object]) -> SourceTest:
        """See :func:`watch_source`.

        Raises:
            ConfigError: contradictory settings, or no source.
            NotReadyError: the source sends no picture.
            CapacityError: too many tests are running.
        """
        camera = camera_settings(self._config, parse_camera(name, source, settings=settings))
        test = asyncio.create_task(self._watch(camera))
        # Mark the exception as retrieved: the caller may have left.
        test.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        # Shielded: if the caller leaves, the thread runs on and must hold its slot until it ends.
        return await asyncio.shield(test)

    async def _watch(self, camera: CameraConfig) -> SourceTest:
        with self._places.taken():
            return await asyncio.to_thread(watch_source, camera, self._config, self.geometry or USUAL_GEOMETRY)
