"""Growth of a decoder process by streams that ask for more memory than any camera needs.

Each stream is a file that a process of its own plays through the pipeline that production runs for a camera, from the
probing of the container to its patches: this file, run as a script, plays a small video first, so that growth is the
stream's own, and prints what the process grew by at most, what it kept, and what the camera says.
"""

import gc
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import hostile_video
import numpy as np
from av.video.codeccontext import VideoCodecContext
from process_memory import process_memory_mib

from cluster.codec import FileSource
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings, PipelineStatus
from cluster.errors import SightlineError
from cluster.lab.bench.harness import BenchResult
from cluster.types import PatchGeometry

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
MIB = 2**20
DEADLINE_S = 120.0

ORDINARY = ("4K, 4 references", "4K, 8-bit AV1")
"""Must be decoded: a decoder that refuses everything would grow by nothing."""


def measure(seed: int) -> BenchResult:
    """See the package."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = _write(folder / "small.h264", hostile_video.many_references(320, 192, 1))
        rows = [play(stream, path, small) for stream, path in streams(folder)]
    for row in rows:
        if row["stream"] in ORDINARY and row["refused"] is not None:
            raise SightlineError(f"{row['stream']} was not decoded: {row['refused']}")
    return BenchResult({"decoder_bomb_mb": max(row["peak_mb"] for row in rows)}, rows)


def streams(folder: Path) -> Iterable[tuple[str, Path]]:
    """What each is, and its file, made when it is asked for."""
    made: list[tuple[str, Callable[[], Iterable[bytes]]]] = [
        (ORDINARY[0], lambda: hostile_video.many_references(3840, 2160, 4)),
        ("8192 x 8192, 16 references", lambda: hostile_video.many_references(8192, 8192, 16)),
        ("4K, 16 references", lambda: hostile_video.many_references(3840, 2160, 16)),
        ("4K, 1 reference, shown back to front", lambda: hostile_video.late_pictures(3840, 2160)),
        ("29 megapixels, vectors everywhere", lambda: hostile_video.many_vectors(6144, 4800)),
        ("another size at every keyframe", lambda: hostile_video.changing_sizes(4096, 2304, 7)),
        ("another size, each too large", lambda: hostile_video.changing_sizes(8192, 4320, 8, keyframes=6)),
        ("endless parameter sets", lambda: hostile_video.endless_parameter_sets(1920, 1088)),
    ]
    for index, (what, units) in enumerate(made):
        yield what, _write(folder / f"{index}.h264", units())
    pictures = encoded("libx265", 4096, 2304, 24, preset="ultrafast", **{"x265-params": X265})
    yield "HEVC, 15 references", _write(folder / "declared.hevc", pictures)
    pictures[0] = hostile_video.one_declared(pictures[0])
    yield "HEVC, 15 references, 1 declared", _write(folder / "undeclared.hevc", pictures)
    av1 = {"preset": "12", "svtav1-params": "lp=1"}
    for what, width, height, form in (
        (ORDINARY[1], 3840, 2160, "yuv420p"),
        ("4K, 10-bit AV1", 3840, 2160, "yuv420p10le"),
        ("AV1 of 15 megapixels", 5120, 2880, "yuv420p"),
    ):
        pictures = encoded("libsvtav1", width, height, 12, form, **av1)
        yield what, _write(folder / f"{width}-{form}.obu", pictures)
    jpeg = encoded("mjpeg", 256, 256, 1, "yuvj444p")[0]
    huge = hostile_video.resized_jpeg(jpeg, 8192, 8192)
    yield "JPEG that claims 8192 x 8192", _write(folder / "huge.mjpeg", [huge] * 8)


def encoded(encoder: str, width: int, height: int, pictures: int, form: str = "yuv420p", **options: str) -> list[bytes]:
    """Packets of a grey picture with a corner that changes."""
    # SVT-AV1, run by root, makes the thread that calls it one of real time for good, and processes that it starts.
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_encode, encoder, width, height, pictures, form, options).result()


def _encode(encoder: str, width: int, height: int, pictures: int, form: str, options: dict[str, str]) -> list[bytes]:
    context = av.CodecContext.create(encoder, "w")
    assert isinstance(context, VideoCodecContext)
    context.width, context.height, context.pix_fmt, context.time_base = width, height, form, Fraction(1, 25)
    context.framerate, context.gop_size, context.options = Fraction(25), 1000, options
    plane = np.full((height * 3 // 2, width), 128, np.uint8)
    packets: list[bytes] = []
    for index in range(pictures):
        plane[:64, :64] = 10 * index
        frame = av.VideoFrame.from_ndarray(plane, "yuv420p").reformat(format=form)
        frame.pts = index
        packets += [bytes(packet) for packet in context.encode(frame)]
    return packets + [bytes(packet) for packet in context.encode(None)]


X265 = "log-level=error:ref=15:bframes=0:rc-lookahead=1:frame-threads=1:scenecut=0:allow-non-conformance=1"


def play(stream: str, path: Path, small: Path) -> dict[str, Any]:
    """A row: the growth of a process that plays the stream, and what its camera says of it."""
    command = [sys.executable, __file__, str(small), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise SightlineError(f"the decoder process ended with {done.returncode} on {stream!r}: {done.stderr[-500:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"stream": stream, "bytes": path.stat().st_size} | told


def _write(path: Path, units: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(units))
    return path


# -- the decoder process ------------------------------------------------------------------------
def run_camera(path: Path) -> PipelineStatus:
    """A camera of this file, from its beginning to its end."""
    ended = threading.Event()
    pipeline = CameraPipeline(
        "camera", FileSource(path), GEOMETRY, PipelineSettings(), lambda *_: None, lambda _: ended.set()
    )
    pipeline.start()
    ended.wait(DEADLINE_S)
    return pipeline.status()


def main(small: Path, path: Path) -> None:
    """Prints one line of JSON."""
    run_camera(small)
    gc.collect()
    # The high-water mark begins anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = process_memory_mib("VmRSS")
    status = run_camera(path)
    peak = process_memory_mib("VmHWM") - before
    gc.collect()
    refused = status.reason if status.state.value == "error" else None
    print(
        json.dumps(
            {
                "peak_mb": round(peak, 1),
                "kept_mb": round(process_memory_mib("VmRSS") - before, 1),
                "pictures": status.stats.frames_decoded,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
