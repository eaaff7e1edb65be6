"""What a camera in its decoder process holds for people to see: its newest picture, its newest packets, never more."""

from __future__ import annotations

import io

import numpy as np
import pytest
from camera_parts import Keeper, camera_bench, until
from PIL import Image

from actors.running_camera import RING_SLACK_S, camera_footage, ring_s
from cluster.config import camera_settings, load_config
from cluster.errors import NotReadyError
from cluster.footage.ring import RingBudget
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
        until("frames", lambda: len(keeper.frames) >= 3)
        plain, kept = footage.latest.render(), footage.latest.render(kept=True)
        grid = keeper.frames[-1].grid
        assert (plain.width, plain.height) == (grid.width, grid.height)
        assert plain.jpeg != kept.jpeg
        # The second sample of the newest frame.
        assert plain.pts > keeper.frames[-1].pts
        recording = footage.ring.record(MICROSECONDS, 3 * MICROSECONDS)
        assert recording.complete
        assert recording.stretch.codec == "h264"
        assert bench.rings.held == footage.ring.bytes > 0
    assert bench.rings.held == 0
    with pytest.raises(NotReadyError):
        footage.latest.render()


def test_a_masked_camera_shows_its_mask(clip) -> None:
    with camera_bench(clip, privacy_masks=[LEFT]) as bench:
        keeper = Keeper()
        bench.camera.route(bench.replica(keeper))
        bench.push(3)
        until("frames", lambda: len(keeper.frames) >= 1)
        picture = np.asarray(Image.open(io.BytesIO(bench.camera.footage.latest.render().jpeg)).convert("L"))
        assert picture[:, : picture.shape[1] // 2 - 8].max() < 24
        assert picture[:, picture.shape[1] // 2 + 8 :].mean() > 40
        assert bench.camera.footage.painter() is not None


def test_the_ring_reaches_back_to_what_opens_an_incident() -> None:
    config = load_config(
        None,
        {
            "cameras": [{"name": "gate"}],
            "questions": [{"id": "a", "text": "?", "consecutive": 3}],
            "window": {"length_s": 40, "stride_s": 8},
        },
    )
    settings = camera_settings(config, config.cameras[0])
    assert ring_s(settings, config) == 10 + 40 + 3 * 8 + RING_SLACK_S
    longest = config.model_copy(update={"clips": config.clips.model_copy(update={"longest_s": 30.0})})
    assert ring_s(settings, longest) == 30 + RING_SLACK_S
    for section in ("clips", "alerts"):
        off = config.model_copy(update={section: getattr(config, section).model_copy(update={"enabled": False})})
        assert camera_footage(settings, off, RingBudget(1 << 20)).ring is None
