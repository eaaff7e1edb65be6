"""Pictures on demand: the newest sample plain and with what is kept, and stills of a moment."""

import io
import time

import numpy as np
import pytest
from footage_parts import HEIGHT, STEP, WIDTH, grey, sample, video
from PIL import Image

from cluster.codec.privacy import PrivacyMasks
from cluster.decoder.footage.pictures import LatestPicture, still
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.errors import NotReadyError, SourceError


def grey_of(jpeg: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("L")).astype(int)


def test_plain_kept_and_smaller():
    latest, mask = LatestPicture(), np.zeros((4, 6), bool)
    with pytest.raises(NotReadyError, match="no picture of this camera yet"):
        latest.render()
    mask[:, :2] = True
    latest.show(sample(3), mask, time.monotonic())
    plain = latest.render()
    assert (plain.width, plain.height, plain.pts) == (96, 64, 1_500_000)
    assert grey_of(plain.jpeg) == pytest.approx(200, abs=3)
    kept = grey_of(latest.render(kept=True).jpeg)
    assert kept[:, 4:26] == pytest.approx(200, abs=8)
    assert kept[:, 44:].max() < 90
    small = latest.render(width=48)
    assert (small.width, small.height) == (48, 32)
    # Never larger than it is, and never of no size.
    assert latest.render(width=4000).width == 96
    assert latest.render(width=1).width == 16


def test_a_form_is_made_once_and_another_picture_is_another():
    latest, mask = LatestPicture(), np.ones((4, 6), bool)
    latest.show(sample(0), mask, time.monotonic())
    first = latest.render()
    assert latest.render().jpeg is first.jpeg
    tags = {latest.render(kept=kept, width=width).etag for kept in (False, True) for width in (0, 32, 48)}
    assert len(tags) == 6
    latest.show(sample(1), mask, time.monotonic())
    assert latest.render().etag not in tags
    # The same sample of the same video, played again with a privacy mask.
    again, masked = LatestPicture(), sample(1)
    masked.rgb[:24] = 0
    again.show(masked, mask, time.monotonic())
    assert again.render().etag != latest.render().etag
    latest.clear()
    with pytest.raises(NotReadyError):
        latest.render()


def group(header, packets, moment):
    ring = PacketRing(100.0, 1 << 26, RingBudget(1 << 30))
    ring.open(header)
    for packet in packets:
        ring.add_packet(packet)
    return ring.gop_packets(moment)


def test_a_still_shows_its_moment_in_full_size(h264, h264_b):
    for header, packets in (h264, h264_b):
        for index in (40, 47, 59):
            jpeg = still(group(header, packets, index * STEP), index * STEP, None)
            assert grey_of(jpeg).shape == (HEIGHT, WIDTH)
            assert grey_of(jpeg).mean() == pytest.approx(grey(index), abs=4)


def test_a_still_of_a_long_gop_shows_its_moment_or_is_refused():
    header, packets = video(530, gop=530)
    for index in (63, 64, 190, 511):
        assert grey_of(still(group(header, packets, index * STEP), index * STEP, None)).mean() == pytest.approx(
            grey(index), abs=4
        )
    with pytest.raises(SourceError, match="too far back"):
        still(group(header, packets, 520 * STEP), 520 * STEP, None)


def test_a_still_is_masked(h264):
    masks = PrivacyMasks([((0.0, 0.0), (1.0, 0.0), (1.0, 0.5), (0.0, 0.5))])
    shown = grey_of(still(group(*h264, 0), 0, masks.apply))
    assert shown[:24].max() < 16
    assert shown[40:].mean() == pytest.approx(grey(0), abs=6)


def test_no_still_of_nothing(h264):
    with pytest.raises(SourceError, match="no decodable picture"):
        still([], 0, None)

    with pytest.raises(SourceError, match=r"source_options\.decoded_bytes"):
        still(group(*h264, 0), 0, None, decoded_bytes=1024)

    def refuse(frame):
        raise ValueError("upside down")

    with pytest.raises(SourceError, match="privacy masks cannot be applied"):
        still(group(*h264, 0), 0, refuse)
