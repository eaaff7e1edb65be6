"""What a camera in its decoder process holds for people to see: its newest picture, its newest packets, never more."""

import io
from dataclasses import replace

import numpy as np
import pytest
from camera_parts import Keeper, camera_bench
from PIL import Image
from waiting import until

from cluster.config import camera_settings, load_config
from cluster.control.ladder import FULL
from cluster.decoder.footage.camera import camera_footage, clip_lookback_s
from cluster.decoder.footage.ring import RingBudget
from cluster.errors import NotReadyError
from cluster.types import MICROSECONDS

LEFT = [[0, 0], [0.5, 0], [0.5, 1], [0, 1]]


def test_pictures_and_packets_of_a_running_camera(clip) -> None:
    with camera_bench(clip) as bench:
        footage = bench.camera.footage
        with pytest.raises(NotReadyError):
            footage.latest.render()
        keeper = Keeper()
        bench.camera.route(bench.replica(keeper))
        bench.push(6)
        until(lambda: len(keeper.frames) >= 3, "frames")
        plain, kept = footage.latest.render(), footage.latest.render(kept=True)
        grid = keeper.frames[-1].grid
        assert (plain.width, plain.height) == (grid.width, grid.height)
        assert plain.jpeg != kept.jpeg
        # The second sample of the newest frame.
        assert plain.pts > keeper.frames[-1].pts
        recording = footage.ring.record(MICROSECONDS, 3 * MICROSECONDS)
        assert recording.complete
        assert recording.segment.codec == "h264"
        assert bench.rings.held == footage.ring.bytes > 0
    assert bench.rings.held == 0
    with pytest.raises(NotReadyError):
        footage.latest.render()


def test_a_masked_camera_shows_its_mask(clip) -> None:
    with camera_bench(clip, privacy_masks=[LEFT]) as bench:
        keeper = Keeper()
        bench.camera.route(bench.replica(keeper))
        bench.push(3)
        until(lambda: len(keeper.frames) >= 1, "frames")
        picture = np.asarray(Image.open(io.BytesIO(bench.camera.footage.latest.render().jpeg)).convert("L"))
        assert picture[:, : picture.shape[1] // 2 - 8].max() < 24
        assert picture[:, picture.shape[1] // 2 + 8 :].mean() > 40
        assert bench.camera.footage.make_painter() is not None


def test_no_packets_are_held_where_no_clips_are_kept() -> None:
    config = load_config(None, {"cameras": [{"name": "gate"}], "questions": [{"id": "a", "text": "?"}]})
    settings = camera_settings(config, config.cameras[0])
    assert camera_footage(settings, config, RingBudget(1 << 20)).ring is not None
    for section in ("clips", "alerts"):
        off = config.model_copy(update={section: getattr(config, section).model_copy(update={"enabled": False})})
        assert camera_footage(settings, off, RingBudget(1 << 20)).ring is None


def test_stills_and_clips_may_decode_what_the_camera_may() -> None:
    camera = {"name": "gate", "source_options": {"decoded_bytes": 400 << 20}}
    config = load_config(None, {"cameras": [camera], "questions": [{"id": "a", "text": "?"}]})
    settings = camera_settings(config, config.cameras[0])
    assert camera_footage(settings, config, None).decoded_bytes == 400 << 20


def test_the_ring_follows_the_windows(clip) -> None:
    with camera_bench(clip) as bench:
        ring, camera = bench.camera.footage.ring, bench.camera
        assert ring.keep_s == clip_lookback_s(camera.settings, bench.config)
        longer = camera.settings.window.model_copy(update={"length_s": 100.0})
        assert camera.apply_settings(camera.settings.model_copy(update={"window": longer}))
        assert ring.keep_s == clip_lookback_s(camera.settings, bench.config)
        # At a lower quality windows come less often, and answers later.
        before = ring.keep_s
        camera.set_rung(replace(FULL, stride=2.0))
        assert ring.keep_s > before


def test_a_camera_whose_clips_begin_late_says_so(clip, caplog) -> None:
    with camera_bench(clip) as bench:
        ring = bench.camera.footage.ring
        bench.camera.route(bench.replica(Keeper()))
        bench.push(6)
        assert bench.camera.report().reason != "clips begin late: clips.ring_camera_bytes is too small"
        ring.most_bytes = ring.bytes // 2
        bench.push(12)
        for _ in range(2):
            report = bench.camera.report()
        assert report.reason == "clips begin late: clips.ring_camera_bytes is too small"
        assert caplog.text.count("so that clips begin late: clips.ring_camera_bytes is") == 1
        assert bench.rings.short == 1
    assert bench.rings.short == 0
