"""Videos that many tests use, encoded once."""

import pytest
from footage_parts import video


@pytest.fixture(scope="session")
def h264():
    """Ten seconds, a keyframe each second."""
    return video(200)


@pytest.fixture(scope="session")
def h264_b():
    """The same with B-pictures."""
    return video(200, b_frames=2)
