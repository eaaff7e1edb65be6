"""Real encoded videos of a few kilobytes, and a directory of them laid out as UCF-Crime is published."""

import av
import numpy as np
import pytest
from av.video.frame import VideoFrame

ANNOTATION_FILE = "Temporal_Anomaly_Annotation_for_Testing_Videos.txt"


def write_video(path, seconds, fps=30, *, faststart=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"movflags": "faststart"} if faststart else {}) as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast", "crf": "40"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuv420p", 2 * fps
        stream.codec_context.thread_count = 1
        rng = np.random.default_rng(0)
        for number in range(round(seconds * fps)):
            picture = rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)
            frame = VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.fixture(name="write_video")
def write_video_fixture():
    return write_video


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return {seconds: write_video(folder / f"{seconds}.mp4", seconds) for seconds in (2, 10)}


@pytest.fixture
def put(tmp_path, clips):
    """Puts a copy of a clip at a path in the dataset."""

    def put(name, seconds=10):
        path = tmp_path / "UCF_Crimes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(clips[seconds].read_bytes())

    return put


@pytest.fixture
def ucf(tmp_path, put):
    """Two fights, an abuse and two normal test videos; one of training; parts and spelling as in the archives."""
    root = tmp_path / "UCF_Crimes"
    put("Anomaly-Videos-Part-2/Fighting/Fighting003_x264.mp4")
    put("Anomaly-Videos-Part-2/Fighting/Fighting047_x264.mp4")
    put("Anomaly-Videos-Part-2/Fighting/Fighting002_x264.mp4")
    put("Anomaly-Videos-Part-1/Abuse/Abuse028_x264.mp4")
    put("Testing_Normal_Videos_Anomaly/Normal_Videos_003_x264.mp4")
    put("Testing_Normal_Videos_Anomaly/Normal_Videos_006_x264.mp4")
    put("z_Normal_Videos_event/Normal_Videos_003_x264.mp4")
    splits = root / "UCF_Crimes-Train-Test-Split" / "Anomaly_Detection_splits"
    splits.mkdir(parents=True)
    # Line ends as in the published file.
    splits.joinpath("Anomaly_Test.txt").write_bytes(
        b"Abuse/Abuse028_x264.mp4\r\nFighting/Fighting003_x264.mp4\r\nFighting/Fighting047_x264.mp4\r\n"
        b"Testing_Normal_Videos_Anomaly/Normal_Videos_003_x264.mp4\r\n"
        b"Testing_Normal_Videos_Anomaly/Normal_Videos_006_x264.mp4\r\n"
    )
    splits.joinpath("Anomaly_Train.txt").write_text("Fighting/Fighting002_x264.mp4\n")
    root.joinpath(ANNOTATION_FILE).write_text(
        "Abuse028_x264.mp4  Abuse  165  240  -1  -1  \n"
        "Fighting003_x264.mp4  Fighting  30  90  150  210  \n"
        "Fighting047_x264.mp4  Fighting  200  1830  -1  -1  \n"
        "Normal_Videos_003_x264.mp4  Normal  -1  -1  -1  -1  \n"
        "Normal_Videos_006_x264.mp4  Normal  -1  -1  -1  -1  \n"
    )
    return root


@pytest.fixture
def split_file(ucf):
    return next(ucf.rglob("Anomaly_Test.txt"))


@pytest.fixture
def annotation_file(ucf):
    return ucf / ANNOTATION_FILE
