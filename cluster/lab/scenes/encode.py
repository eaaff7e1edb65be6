"""Encodes a scene as its camera would, and writes beside it what is true of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.logging
from av.video.frame import VideoFrame

from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.scene import CameraSettings, Scene
from cluster.lab.scenes.truth import SceneTruth, scene_truth, truth_path

# Cameras keep the GOP they were given, whatever happens, and close it. With its macroblock tree x264 encodes the same
# pictures now one way, now another when there are B-frames.
_X264 = "mbtree=0:scenecut=0"


_X265 = "log-level=error:pools=none:frame-threads=1:cutree=0:scenecut=0:open-gop=0"


def encode_scene(scene: Scene, path: str | Path, *, event: str | None = "any") -> SceneTruth:
    """Draw and encode one scene; the truth is returned and saved as JSON beside the video.

    The same scene gives the same bytes. Both files appear under their names only when they are whole, the video last.

    Args:
        scene: what to encode, at its camera's size, rate and settings.
        path: of the video (MP4); its folder must exist.
        event: what ``make_scene`` was asked for, kept in the truth.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(path)
    part = partial_path(path)
    renderer = SceneRenderer(scene, scene.camera.width, scene.camera.height)
    try:
        _encode(scene, renderer, part)
        truth = scene_truth(scene, renderer, event)
        truth.save(truth_path(path))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return truth


def partial_path(path: Path) -> Path:
    """Where a video is written before it is whole."""
    return path.with_name(f".{path.name}.part")


def _encode(scene: Scene, renderer: SceneRenderer, path: Path) -> None:
    camera = scene.camera
    rate = Fraction(camera.fps).limit_denominator(1001)
    with _quiet(), av.open(str(path), "w", format="mp4") as container:
        stream = _stream(container, camera, rate)
        for number in range(round(scene.seconds * camera.fps)):
            picture = renderer.picture(number / camera.fps, number)
            frame = VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _stream(container: Any, camera: CameraSettings, rate: Fraction) -> Any:
    # PyAV's stubs know no encoder by name.
    if camera.codec == "hevc":
        encoder, options = "libx265", {"preset": "ultrafast", "crf": str(camera.crf), "x265-params": _X265}
    else:
        encoder, options = "libx264", {"preset": "veryfast", "crf": str(camera.crf), "x264-params": _X264}
    stream = container.add_stream(encoder, rate=rate, options=options)
    stream.width, stream.height, stream.pix_fmt = camera.width, camera.height, "yuv420p"
    stream.gop_size = max(1, round(camera.gop_s * camera.fps))
    stream.codec_context.max_b_frames = camera.bframes
    stream.codec_context.thread_count = 1
    return stream


@contextmanager
def _quiet() -> Iterator[None]:
    """x265 sets itself up with a burst of lines that no verbosity of its own silences."""
    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    try:
        yield
    finally:
        av.logging.set_level(level)
