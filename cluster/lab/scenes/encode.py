"""Encodes scenes as their cameras would, one or many at a time, with the ground truth beside each video."""

import multiprocessing
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.logging
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from cluster.errors import ConfigError, SightlineError
from cluster.hosts import hold_interrupts, start_pool_process
from cluster.lab.scenes.actors import CameraSettings, Scene
from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.truth import SceneTruth, scene_truth, truth_path

# Cameras have fixed, closed GOPs. mbtree makes x264 with B-frames nondeterministic.
_X264 = "mbtree=0:scenecut=0"
_X265 = "log-level=error:pools=none:frame-threads=1:cutree=0:scenecut=0:open-gop=0"


@dataclass(frozen=True, slots=True)
class VideoEncoding:
    """``encoder``: FFmpeg's name; ``options``: its options; ``gop``: frames between I-frames."""

    encoder: str
    options: dict[str, str]
    width: int
    height: int
    fps: float
    gop: int
    bframes: int


def write_video(path: Path, encoding: VideoEncoding, frames: Iterable[VideoFrame]) -> None:
    """Encode yuv420p frames into an MP4, on one thread so that the bytes are reproducible."""
    rate = Fraction(encoding.fps).limit_denominator(1001)
    with _quiet_ffmpeg(), av.open(str(path), "w", format="mp4") as container:
        # PyAV's stubs do not type encoders chosen by name.
        stream: Any = container.add_stream(encoding.encoder, rate=rate, options=encoding.options)
        stream.width, stream.height, stream.pix_fmt = encoding.width, encoding.height, "yuv420p"
        stream.gop_size = encoding.gop
        stream.codec_context.max_b_frames = encoding.bframes
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(frames):
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


@contextmanager
def _quiet_ffmpeg() -> Iterator[None]:
    """Silences x265's banner, which its own log level does not."""
    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    try:
        yield
    finally:
        av.logging.set_level(level)


def encode_scene(scene: Scene, path: str | Path, *, event: str | None = "any") -> SceneTruth:
    """Draw and encode one scene at its camera's size and rate, and save its truth as JSON beside the video.

    The bytes are reproducible. Both files appear only when complete, the video last. ``event``: argument that
    ``make_scene`` was given, recorded in the truth. Raises ``OSError``: the folder cannot be written.
    """
    path = Path(path)
    part = partial_path(path)
    renderer = SceneRenderer(scene, scene.camera.width, scene.camera.height)
    try:
        write_video(part, _camera_encoding(scene.camera), _draw_frames(scene, renderer))
        truth = scene_truth(scene, renderer, event)
        # One of before must not be taken for what this truth tells of.
        path.unlink(missing_ok=True)
        truth.save(truth_path(path))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return truth


def partial_path(path: Path) -> Path:
    """Path of a video that is being written."""
    return path.with_name(f".{path.name}.part")


def _draw_frames(scene: Scene, renderer: SceneRenderer) -> Iterator[VideoFrame]:
    # One for all frames: a frame's own sets up the conversion again.
    reformatter = VideoReformatter()
    for number in range(round(scene.seconds * scene.camera.fps)):
        picture = renderer.picture(number / scene.camera.fps, number)
        yield reformatter.reformat(VideoFrame.from_ndarray(picture, format="rgb24"), format="yuv420p")


def _camera_encoding(camera: CameraSettings) -> VideoEncoding:
    if camera.codec == "hevc":
        encoder, options = "libx265", {"preset": "ultrafast", "crf": str(camera.crf), "x265-params": _X265}
    else:
        encoder, options = "libx264", {"preset": "veryfast", "crf": str(camera.crf), "x264-params": _X264}
    gop = max(1, round(camera.gop_s * camera.fps))
    return VideoEncoding(encoder, options, camera.width, camera.height, camera.fps, gop, camera.bframes)


@dataclass(frozen=True, slots=True)
class SceneClip:
    """A scene and the path of its video. ``event``: argument that ``make_scene`` was given."""

    scene: Scene
    event: str | None
    path: Path

    def is_encoded(self) -> bool:
        """Whether the video is complete and shows this scene as this version of the generator makes it."""
        if not self.path.is_file():
            return False
        try:
            truth = SceneTruth.load(truth_path(self.path))
        except ConfigError:
            return False
        scene = self.scene
        wanted = (scene.seed, self.event, scene.seconds, scene.camera, scene.events)
        return (truth.seed, truth.event, truth.seconds, truth.camera, truth.scene_events) == wanted

    def encode(self) -> Path:
        encode_scene(self.scene, self.path, event=self.event)
        return self.path


def encode_missing_clips(
    clips: Sequence[SceneClip], folder: Path, *, jobs: int = 1, on_clip: Callable[[Path], None] = lambda _: None
) -> int:
    """Encode the clips of ``folder`` that are not encoded yet, with ``jobs`` processes; returns how many.

    ``on_clip``: called with the path of every finished clip, at once for existing ones. Raises ``SightlineError``: a
    clip cannot be written, or a process died.
    """
    missing = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for clip in clips:
            if clip.is_encoded():
                on_clip(clip.path)
            else:
                missing.append(clip)
        with closing(_encode_all(missing, jobs)) as finished:
            for path in finished:
                on_clip(path)
    except BrokenProcessPool:
        raise SightlineError("a rendering process died, perhaps for lack of memory; run it again to resume") from None
    except OSError as error:
        # FFmpeg's errors are OSErrors too.
        raise SightlineError(f"cannot write scenes to {folder}: {error.strerror or error}") from None
    finally:
        for clip in clips:
            partial_path(clip.path).unlink(missing_ok=True)
    return len(missing)


def _encode_all(clips: Sequence[SceneClip], jobs: int) -> Generator[Path, None, None]:
    """Paths of clips in order of completion."""
    if jobs == 1 or len(clips) < 2:
        yield from (clip.encode() for clip in clips)
        return
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(clips)), context, initializer=start_pool_process) as pool:
        try:
            with hold_interrupts():
                futures = [pool.submit(clip.encode) for clip in clips]
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            # After Ctrl-C or an error do not wait for clips in progress. The pool notices and cleans up.
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise
