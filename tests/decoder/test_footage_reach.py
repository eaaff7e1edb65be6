"""How far back packets must reach and what that takes: the arithmetic of docs/clips.md, and who is told."""

import pytest

from cluster.config import camera_settings, load_config
from cluster.decoder.footage.camera import clip_lookback_s, clip_shortages, footage_bytes
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.types import MICROSECONDS, EncodedPacket


def configuration(cameras=("gate",), **sections):
    questions = [{"id": "a", "text": "?"}]
    return load_config(None, {"cameras": [{"name": name} for name in cameras], "questions": questions, **sections})


def reach(config, **more):
    return clip_lookback_s(camera_settings(config, config.cameras[0]), config, **more)


def test_to_the_first_window_what_is_shown_before_it_and_how_late_an_answer_comes():
    config = configuration(window={"length_s": 40, "stride_s": 8})
    # 10 s before, windows that end at 0 and 8 s, and an answer that is three strides late: two in the queue, one more.
    assert reach(config) == 10 + 40 + 8 + 3 * 8
    assert reach(config, stride_s=16) == 10 + 40 + 16 + 3 * 16
    three = configuration(window={"length_s": 8, "stride_s": 2}, alerts={"consecutive": 3}, cluster={"window_queue": 1})
    assert reach(three) == 10 + 8 + 2 * 2 + 2 * 2
    asked = configuration(window={"length_s": 8, "stride_s": 2}, questions=[{"id": "a", "text": "?", "consecutive": 5}])
    assert reach(asked) == 10 + 8 + 4 * 2 + 3 * 2
    # No clip is longer than that.
    assert reach(configuration(clips={"longest_s": 20})) == 20 + 3 * 8


def test_the_defaults_hold_ordinary_cameras():
    """1080p at 4 Mbit/s, a keyframe every two seconds."""
    config = configuration()
    wanted = footage_bytes(reach(config))
    assert wanted == (82 + 2) * 500_000
    assert wanted <= config.clips.ring_camera_bytes
    assert config.clips.ring_bytes // wanted == 25
    assert clip_shortages(configuration([f"c{n}" for n in range(50)])) == []


@pytest.mark.parametrize(
    ("cameras", "sections", "told"),
    [
        (1, {"window": {"length_s": 100}}, "clips of camera c0 will begin late if they send 4 Mbit/s or more: their "
         "packets take up to 72 MB, and clips.ring_camera_bytes is 50 MB"),
        (51, {}, None),
        (60, {}, "clips will begin late if the 60 cameras on 2 decoders send 4 Mbit/s each: their packets take 1260 MB "
         "of a decoder, and clips.ring_bytes is 1074 MB"),
        (60, {"clips": {"enabled": False}}, None),
        (60, {"alerts": {"enabled": False}}, None),
        (60, {"cluster": {"decoders": 3}}, None),
    ],
)  # fmt: skip
def test_who_holds_too_little_is_told_before_it_starts(cameras, sections, told):
    found = clip_shortages(configuration([f"c{n}" for n in range(cameras)], **sections))
    assert found == ([told] if told else [])


def fed(ring, seconds, bytes_per_s, first=0):
    """A keyframe each second."""
    for second in range(first, first + seconds):
        time = second * MICROSECONDS
        ring.add_packet(EncodedPacket("mpeg4", bytes(bytes_per_s), time, time, True, second))


def test_a_ring_that_is_too_small_says_which_setting_keeps_it_so():
    budget = RingBudget(1000)
    small, large = PacketRing(10.0, 300, budget), PacketRing(10.0, 10_000, budget)
    fed(small, 4, 100)
    assert (small.short, budget.short) == ("clips.ring_camera_bytes", 1)
    assert small.shortage() == (
        "its packets reach back 2 of 10 s at 0.0 Mbit/s, so that clips begin late: clips.ring_camera_bytes is 0 MB"
    )
    fed(large, 9, 100)
    assert (large.short, budget.short) == ("clips.ring_bytes", 2)
    assert large.shortage().endswith("clips.ring_bytes is 0 MB for all cameras")
    # The other one goes: there is room, and it is seen once packets go by age again.
    small.close()
    assert budget.short == 1
    fed(large, 12, 50, first=9)
    assert (large.short, budget.short, budget.held) == ("", 0, large.bytes)
    large.close()
    large.close()
    assert (budget.short, budget.held) == (0, 0)


@pytest.mark.parametrize(("before_s", "left"), [(0.0, 0), (3.5, 4), (100.0, 10)])
def test_what_was_longer_ago_is_forgotten(before_s, left):
    budget = RingBudget(1 << 20)
    ring = PacketRing(60.0, 1 << 20, budget)
    fed(ring, 10, 100)
    old, new = (ring.record(start * MICROSECONDS, 60 * MICROSECONDS) for start in (2, 8))
    assert ring.delete_before(before_s) == (10 - left) * 100
    assert budget.held == ring.bytes == left * 100
    assert bool(old.end_reason) == (before_s < 100)
    assert bool(new.end_reason) == (before_s == 0)
    fed(ring, 1, 100, first=10)
    assert ring.bytes == (left + 1) * 100
