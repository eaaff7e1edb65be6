from __future__ import annotations

import argparse
import os
from pathlib import Path

import av
import pytest
from codec_clips import encode, walk

from cluster.codec.decoder import Decoder
from cluster.errors import ConfigError
from cluster.lab.bench import codec


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    codec.add_arguments(parser)
    return parser.parse_args(given)


def test_the_bench_measures_every_clip_and_leaves_no_trace(tmp_path: Path) -> None:
    clips = [encode(tmp_path / f"{name}.mp4", walk(20)) for name in ("a", "b")]
    allowed, decode = os.sched_getaffinity(0), Decoder.decode
    result = codec.run(arguments("--repeats", "1", "--clips", *map(str, clips)))
    assert set(result.figures) == {"front_end_ratio_a", "front_end_ratio_b"}
    assert all(0 < figure < 3 for figure in result.figures.values())
    assert [row["frames"] for row in result.rows] == [20, 20]
    assert result.rows[0]["samples"] == 2
    assert result.rows[0]["decode_ms"] > 0
    assert result.rows[0]["prune_ms"] > 0
    assert os.sched_getaffinity(0) == allowed
    assert Decoder.decode is decode


def test_the_made_clip_is_a_moving_camera_view(tmp_path: Path) -> None:
    path = tmp_path / "made.mp4"
    codec.make_clip(path, 0.3, width=640, height=360)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.average_rate) == (640, 360, 20)
        assert sum(1 for _ in container.decode(stream)) == 6


def test_a_missing_clip_is_told() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.mp4 does not exist"):
        codec.run(arguments("--clips", "nowhere.mp4"))
