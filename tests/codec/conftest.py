"""Clips that several codec tests read, encoded once."""

from pathlib import Path

import pytest
from codec_clips import H264_CLIPS, encode, walk


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four seconds of the walk at 20 fps, GOP 20: H.264 of several kinds, and HEVC."""
    folder = tmp_path_factory.mktemp("clips")
    pictures = walk(80)
    made = {name: encode(folder / f"{name}.mp4", pictures, **kind) for name, kind in H264_CLIPS.items()}
    made["hevc"] = encode(folder / "hevc.mp4", pictures, "libx265", b_frames=0)
    made["hevc_b"] = encode(folder / "hevc_b.mp4", pictures, "libx265", b_frames=3)
    return made
