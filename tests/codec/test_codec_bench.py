from __future__ import annotations

import argparse
import os
from pathlib import Path

import av
import numpy as np
import pytest
from codec_clips import encode, walk

from cluster.codec.decoder import Decoder
from cluster.errors import ConfigError
from cluster.lab.bench import codec
from cluster.lab.bench.harness import against_goals
from cluster.lab.bench.lazy import LazyRun, missed_cells, share_of_kept
from cluster.types import MICROSECONDS, FrameSample, PatchGrid


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


def test_each_half_is_first_in_every_other_turn(monkeypatch) -> None:
    """The second finds the file, and its pages, where the first had to wait for them."""
    ran = []
    monkeypatch.setattr(codec, "decode_bare", lambda clip: ran.append("bare") or 20)
    monkeypatch.setattr(codec, "run_front_end", lambda *_: ran.append("front") or (20, 2))
    codec.measure(Path("a.mp4"), codec.CodecOptions(), "replenish", 4)
    turns = [tuple(ran[index : index + 2]) for index in range(0, 10, 2)]
    assert sorted(turns[1:]) == [("bare", "front")] * 2 + [("front", "bare")] * 2
    assert turns[1] != turns[2]


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


def frame(at_s: float, cells: list[int], *, anchor: bool = False) -> FrameSample:
    """A second of a camera of eight cells."""
    grid = PatchGrid(1, 8, 14, 1, 2)
    mask = np.isin(np.arange(8), cells).reshape(1, 8)
    nothing = np.empty((0, 2, 3, 14, 14), np.uint8)
    pts = round(at_s * MICROSECONDS)
    return FrameSample("a", 0, pts, MICROSECONDS, anchor, False, grid, mask, nothing, 0.0)


def run(frames: list[FrameSample], late_s: float = 0.0) -> LazyRun:
    sent_at = [each.pts + each.duration + round(late_s * MICROSECONDS) for each in frames]
    return LazyRun(frames, sent_at, 0, 0, "", 0.0, 0.0)


def test_a_cell_is_missed_that_is_not_kept_within_the_stride() -> None:
    full = [frame(0, range(8), anchor=True), frame(1, [0, 1]), frame(2, [2]), frame(3, [3])]
    lazily = [
        frame(0, range(8), anchor=True),
        frame(1, []),
        frame(2, [1]),
        frame(3, [0]),
        frame(7, range(8), anchor=True),
    ]
    # Of cells 0 to 3: 1 comes a second late, 0 two, and 2 and 3 only with the anchor.
    assert missed_cells(run(full), run(lazily), 8.0) == (0, 4)
    assert missed_cells(run(full), run(lazily), 8.0, anchors=False) == (2, 4)
    assert missed_cells(run(full), run(lazily), 3.0) == (2, 4)
    assert missed_cells(run(full), run(lazily), 1.0) == (3, 4)
    assert missed_cells(run(full), run(full), 0.0) == (0, 4)
    # The same frames, each sent three seconds later.
    assert missed_cells(run(full), run(full, late_s=3.0), 3.0) == (0, 4)
    assert missed_cells(run(full), run(full, late_s=3.0), 2.0) == (4, 4)


def test_lazy_needs_time_to_learn() -> None:
    with pytest.raises(ConfigError, match="--seconds must be at least 60 with --lazy, not 20"):
        codec.run(arguments("--lazy", "--seconds", "20"))


def test_where_nothing_was_kept_nothing_is_shown() -> None:
    """A share of nothing meets no goal, on either side."""
    assert share_of_kept([{"kept": 30, "missed": 3}, {"kept": 10, "missed": 0}], "missed") == 3 / 40
    nothing = {"change_missed": share_of_kept([{"kept": 0, "missed": 0}], "missed")}
    for side in ("<=", ">="):
        [row] = against_goals({"change_missed": (side, 0.002)}, "lazy", nothing)
        assert row["met"] == "no"
