"""The demo's parts that need no cluster."""

from pathlib import Path

import pytest

from actors.cli.demo.plan import CAMERAS, write_config
from actors.cli.demo.record import live_windows
from cluster.clips import CLIP_KINDS
from cluster.config import camera_settings, load_config
from cluster.types import Answer, Timing, TokenCount


def test_the_demos_configuration_can_be_run_by_hand(tmp_path):
    clips = {kind: tmp_path / "it's: here" / f"{kind}.mp4" for kind in CLIP_KINDS}
    path = write_config(tmp_path, clips, "tiny-qwen2_5_vl", "native")
    config = load_config(path)
    assert [camera.name for camera in config.cameras] == [camera.name for camera in CAMERAS]
    pulled = {camera.name for camera in config.cameras if camera.source}
    assert pulled == {"street", "night"}
    for name in pulled:
        settings = camera_settings(config, name)
        assert Path(settings.source) == clips[name]
        assert settings.source_options.loop
        assert settings.source_options.realtime
    assert all(len(camera_settings(config, camera.name).questions) == 2 for camera in CAMERAS)
    text = path.read_text()
    for camera in CAMERAS:
        assert ("--camera " + camera.name in text) == camera.pushed


def answer(window, question, score, *, gated=False):
    counts = TokenCount(full=100, kept=40, reused=20, refreshed=8, new=12, query=9, encoded=12)
    start = 10_000_000 + window * 4_000_000
    timing = Timing(latency_s=0.5)
    return Answer("a", window, start, start + 24_000_000, question, score, True, "", gated, counts, timing)


def test_answers_of_a_window_are_put_together():
    given = [answer(1, "a", 0.1), answer(0, "a", 0.2), answer(0, "b", 0.3), answer(1, "b", 0.4, gated=True)]
    first, second = live_windows(given)
    assert (first.start_s, first.end_s, first.scores) == (0.0, 24.0, {"a": 0.2, "b": 0.3})
    assert (first.full, first.kept, first.computed, first.latency_s) == (100, 40, 29, 0.5)
    assert (second.start_s, second.scores, second.computed) == (4.0, {"a": 0.1, "b": 0.4}, 0)
    assert live_windows([]) == ()


@pytest.mark.parametrize("camera", CAMERAS, ids=lambda camera: camera.name)
def test_every_demo_camera_has_a_clip(camera):
    assert camera.name in CLIP_KINDS
