"""Thumbnails: the picture that was drawn comes back, the cap holds whatever comes, and what is forgotten is gone."""

import io
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.replica.memory import WorkerMemory
from cluster.replica.thumbnails import ThumbnailStore
from cluster.types import MICROSECONDS, FrameSample, MemorySpec, PatchGrid, Question, StreamSpec
from cluster.vision.sampler import cut_patches

GRID = PatchGrid(rows=12, cols=16, patch=14, merge=2, temporal=2)
WIDE = PatchGrid(rows=24, cols=32, patch=14, merge=2, temporal=1)
SECOND = MICROSECONDS


def scene(grid, seed=0):
    """A picture with soft gradients and one hard-edged box, so that JPEG changes little of it."""
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 1, grid.width), np.linspace(0, 1, grid.height))
    low, high = rng.integers(20, 100, 3), rng.integers(120, 230, 3)
    picture = low + (0.6 * across + 0.4 * down)[..., None] * (high - low)
    unit = grid.patch * grid.merge
    picture[unit : 2 * unit, unit : 3 * unit] = rng.integers(0, 256, 3)
    return picture.astype(np.uint8)


def frame(grid, picture, pts=0, groups=None, stream="gate", earlier=None):
    groups = np.ones((grid.group_rows, grid.group_cols), bool) if groups is None else groups
    pictures = [picture if earlier is None else earlier] * (grid.temporal - 1) + [picture]
    mask = groups.repeat(grid.merge, axis=0).repeat(grid.merge, axis=1)
    patches = cut_patches(pictures, groups, grid)
    return FrameSample(stream, 0, pts, SECOND, False, False, grid, mask, patches, 0.0)


def opened(file):
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(float)


def reduced(picture, width):
    """The oracle: Pillow's own mean over boxes."""
    size = width, round(picture.shape[0] * width / picture.shape[1])
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BOX)).astype(float)


def times(album, stream="gate"):
    return [] if stream not in album._streams else list(album._streams[stream].times)


def nbytes(album, stream):
    return 0 if stream not in album._streams else album._streams[stream].nbytes


@pytest.mark.parametrize("grid", [GRID, WIDE])
def test_a_picture_comes_back(grid):
    album, picture = ThumbnailStore(quality=90), scene(grid)
    album.add_frame(frame(grid, picture))
    shown = opened(album.nearest("gate", 0))
    assert shown.shape == (120, 160, 3)
    assert np.abs(shown - reduced(picture, 160)).mean() < 3


def test_a_picture_narrower_than_the_thumbnails_keeps_its_size():
    album, picture = ThumbnailStore(width=1000, quality=95), scene(GRID)
    album.add_frame(frame(GRID, picture))
    shown = opened(album.nearest("gate", 0))
    assert shown.shape == picture.shape
    assert np.abs(shown - picture).mean() < 3


def test_kept_patches_are_drawn_onto_what_was_there():
    before, after = scene(WIDE, 1) // 2, 127 + scene(WIDE, 2) // 2
    groups = np.random.default_rng(3).random((WIDE.group_rows, WIDE.group_cols)) < 0.3
    album = ThumbnailStore(quality=95)
    album.add_frame(frame(WIDE, before))
    album.add_frame(frame(WIDE, after, 4 * SECOND, groups))
    # A frame that keeps nothing is a look at the same scene.
    album.add_frame(frame(WIDE, scene(WIDE, 9), 8 * SECOND, np.zeros_like(groups)))
    unit = WIDE.patch * WIDE.merge
    expected = np.where(groups.repeat(unit, 0).repeat(unit, 1)[..., None], after, before)
    shown = opened(album.nearest("gate", 8 * SECOND))
    assert np.abs(shown - reduced(expected, 160)).mean() < 6
    assert min(np.abs(shown - reduced(other, 160)).mean() for other in (before, after)) > 20


def test_of_the_samples_of_a_frame_the_newest_is_shown():
    album = ThumbnailStore(quality=90)
    album.add_frame(frame(GRID, np.full((GRID.height, GRID.width, 3), 200, np.uint8), earlier=scene(GRID)))
    assert np.abs(opened(album.nearest("gate", 0)) - 200).max() < 4


def test_another_shape_of_the_picture_begins_anew():
    album = ThumbnailStore(every_s=1)
    album.add_frame(frame(GRID, scene(GRID)))
    tall = PatchGrid(rows=16, cols=12, patch=14, merge=2, temporal=1)
    nothing = np.zeros((tall.group_rows, tall.group_cols), bool)
    album.add_frame(frame(tall, scene(tall), SECOND, nothing))
    assert np.abs(opened(album.nearest("gate", SECOND)) - 128).max() < 4, "of the other shape nothing is known"
    assert opened(album.nearest("gate", SECOND)).shape[:2] == (213, 160)


def test_one_picture_in_eight_seconds_and_the_nearest_comes_back():
    album, picture = ThumbnailStore(), scene(GRID)
    for second in range(40):
        album.add_frame(frame(GRID, picture, second * SECOND))
    assert times(album) == [0, 8 * SECOND, 16 * SECOND, 24 * SECOND, 32 * SECOND]
    file = {time: album.nearest("gate", time) for time in times(album)}
    assert album.nearest("gate", 11 * SECOND) == file[8 * SECOND]
    assert album.nearest("gate", -8 * SECOND) == file[0]
    assert album.nearest("gate", 40 * SECOND) == file[32 * SECOND]
    for nothing in (-8 * SECOND - 1, 40 * SECOND + 1):
        assert album.nearest("gate", nothing) is None
    assert album.nearest("yard", 0) is None


def test_a_memory_that_begins_anew_shows_nothing_of_before():
    album = ThumbnailStore(every_s=1)
    for second in (1, 1000, 1001, 3, 1001):
        album.add_frame(frame(GRID, scene(GRID, second), second * SECOND))
        assert album.newest_pts("gate") == second * SECOND
    assert times(album) == [second * SECOND for second in (1, 3, 1001)]


def test_long_ago_lies_further_apart_and_the_newest_stays():
    album = ThumbnailStore(every_s=1, cap_bytes=30_000)
    for second in range(300):
        album.add_frame(frame(GRID, scene(GRID, second % 7), second * SECOND))
    seconds = [time // SECOND for time in times(album)]
    gaps = [later - earlier for earlier, later in pairwise(seconds)]
    assert seconds[0] == 0
    assert seconds[-1] == 299
    assert max(gaps[-5:]) == 1
    assert gaps == sorted(gaps, reverse=True), "the older, the further apart"


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 20_000),
    st.lists(
        st.tuples(
            st.sampled_from(["gate", "yard"]),
            st.integers(-30, 60),
            st.integers(0, 3),
            st.sampled_from(["see", "see", "see", "see", "forget before", "forget"]),
        ),
        max_size=40,
    ),
)
def test_the_cap_is_never_exceeded(cap, events):
    album = ThumbnailStore(every_s=2, cap_bytes=cap)
    now = 0
    for stream, step, seed, what in events:
        now += step
        if what == "see":
            album.add_frame(frame(GRID, scene(GRID, seed), now * SECOND, stream=stream))
        elif what == "forget":
            album.delete(stream)
        else:
            album.delete(stream, now * SECOND)
        for name in ("gate", "yard"):
            held = times(album, name)
            assert nbytes(album, name) == sum(len(album.nearest(name, time)) for time in held) <= cap
            assert all(later - earlier >= 2 * SECOND for earlier, later in pairwise(held))


def test_a_cap_below_one_picture_holds_none():
    album = ThumbnailStore(cap_bytes=100)
    album.add_frame(frame(GRID, scene(GRID)))
    assert times(album) == []


def test_forgetting():
    album = ThumbnailStore(every_s=1)
    for second in range(6):
        for stream in ("gate", "yard"):
            album.add_frame(frame(GRID, scene(GRID, second), second * SECOND, stream=stream))
    assert album.delete("gate", 4 * SECOND) == 4
    assert times(album) == [4 * SECOND, 5 * SECOND]
    assert album.nearest("gate", 2 * SECOND) is None
    assert album.delete("gate") == 2
    assert (times(album), nbytes(album, "gate"), album.nearest("gate", 5 * SECOND)) == ([], 0, None)
    assert album.delete("gate") == 0
    assert len(times(album, "yard")) == 6
    # Of what was forgotten nothing shows through in what is drawn later.
    nothing = np.zeros((GRID.group_rows, GRID.group_cols), bool)
    album.add_frame(frame(GRID, scene(GRID), 9 * SECOND, nothing))
    assert np.abs(opened(album.nearest("gate", 9 * SECOND)) - 128).max() < 4


def spec(retention_s):
    return StreamSpec("gate", (Question("fence", "Is anyone there?"),), memory=MemorySpec(retention_s=retention_s))


def feed(memory, seconds, start=0):
    for second in range(start, start + seconds):
        memory.add_frame(frame(GRID, scene(GRID, second % 5), pts=second * SECOND))


def test_pictures_are_kept_as_long_as_the_memory():
    album = ThumbnailStore(every_s=4.0)
    memory = WorkerMemory(None, album, timeout_s=1.0)
    memory.register_camera(spec(20.0))
    feed(memory, 60)
    assert min(times(album)) >= (59 - 20) * SECOND
    assert len(times(album)) >= 5
    # Kept for longer from now on: what is gone is gone, and what comes stays.
    memory.register_camera(spec(3600.0))
    feed(memory, 60, start=60)
    assert min(times(album)) >= (59 - 20) * SECOND
    assert len(times(album)) >= 15
    memory.register_camera(replace(spec(8.0)))
    feed(memory, 1, start=120)
    assert min(times(album)) >= (120 - 8) * SECOND


def test_pictures_of_a_camera_that_sends_nothing_grow_old(monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr("cluster.replica.memory.time", SimpleNamespace(monotonic=lambda: now))
    album = ThumbnailStore(every_s=4.0)
    memory = WorkerMemory(None, album, timeout_s=1.0)
    memory.register_camera(spec(20.0))
    feed(memory, 60)
    now += 10
    memory.expire_pictures()
    # The newest frame is of 59 s, ten seconds ago.
    assert times(album) == [52 * SECOND, 56 * SECOND]
    now += 10.5
    memory.expire_pictures()
    assert album.newest_pts("gate") is None, "nor is the picture that the next one would be drawn onto there"
    feed(memory, 10, start=100)
    memory.expire_pictures()
    assert times(album) == [100 * SECOND, 104 * SECOND, 108 * SECOND]


def test_without_a_retention_the_cap_alone_decides():
    album = ThumbnailStore(every_s=4.0)
    memory = WorkerMemory(None, album, timeout_s=1.0)
    memory.register_camera(spec(None))
    feed(memory, 60)
    assert np.array_equal(times(album), np.arange(0, 60, 4) * SECOND)


def test_an_engine_without_memories_keeps_no_pictures():
    bank, album = MemoryBank(TierStack([Arena(2**20)])), ThumbnailStore(every_s=4.0)
    memory = WorkerMemory(None, album, bank, timeout_s=1.0)
    memory.register_camera(spec(3600.0))
    feed(memory, 10)
    assert album.newest_pts("gate") is None, "the bank holds no memory of it, so that nobody can ask for them"
    bank.open_stream("gate", spec(3600.0).memory)
    feed(memory, 10)
    assert times(album) == [0, 4 * SECOND, 8 * SECOND]
