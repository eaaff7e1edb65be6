"""Containers differ in what they state; what is read of a file must not."""

import pytest

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets import probe_video


@pytest.mark.parametrize("container", ["mp4", "avi", "mkv", "ts"])
@pytest.mark.parametrize("fps", [12, 30])
def test_rate_and_length(tmp_path, write_video, container, fps):
    facts = probe_video(write_video(tmp_path / f"clip.{container}", 5, fps))
    assert facts.fps == pytest.approx(fps, rel=1e-3)
    assert facts.seconds == pytest.approx(5, abs=1.5 / fps)


def test_half_a_file_is_not_a_video(tmp_path, write_video):
    path = write_video(tmp_path / "clip.mkv", 6)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"truncated: ends after \d\.\d of 6\.0 s"):
        probe_video(path)


def test_no_file_no_bytes_no_video(tmp_path, write_video):
    with pytest.raises(ConfigError, match="No such file"):
        probe_video(tmp_path / "nothing.mp4")
    (tmp_path / "empty.mp4").touch()
    with pytest.raises(ConfigError, match=r"empty file \(0 bytes\)"):
        probe_video(tmp_path / "empty.mp4")
    (tmp_path / "text.mp4").write_text("not a video\n" * 100)
    with pytest.raises(ConfigError, match="cannot be read: Invalid data"):
        probe_video(tmp_path / "text.mp4")
