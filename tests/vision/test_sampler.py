import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pasting import paste_patches

from cluster.types import PatchGrid
from cluster.vision import make_pruner
from cluster.vision.pruners.base import PruneDecision, Pruner
from cluster.vision.sampler import PatchSampler, cut_patches

GRIDS = [PatchGrid(8, 12, 14, 2, 2), PatchGrid(4, 6, 7, 1, 3), PatchGrid(6, 6, 4, 3, 1), PatchGrid(4, 4, 14, 2, 1)]


class Scripted(Pruner):
    """Keeps the groups it is told to; records what it saw."""

    def __init__(self, masks):
        self.masks = list(masks)
        self.seen = []

    def prune(self, frame):
        self.seen.append(frame)
        mask = self.masks.pop(0) if self.masks else np.zeros((frame.grid.rows, frame.grid.cols), bool)
        return PruneDecision(mask | frame.anchor | frame.fresh, 0.25 * len(self.seen))


def group_mask(grid, groups):
    mask = np.zeros((grid.rows, grid.cols), bool)
    for row, col in groups:
        mask[row * grid.merge : (row + 1) * grid.merge, col * grid.merge : (col + 1) * grid.merge] = True
    return mask


def in_group_order(grid, mask):
    """Every kept cell, as the docstring of FrameSample tells it, in plain loops."""
    for group_row in range(grid.group_rows):
        for group_col in range(grid.group_cols):
            for down in range(grid.merge):
                for across in range(grid.merge):
                    cell = group_row * grid.merge + down, group_col * grid.merge + across
                    if mask[cell]:
                        yield cell


@given(st.sampled_from(GRIDS), st.integers(0, 2**32 - 1), st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_patches_are_in_group_order(grid, seed, share):
    rng = np.random.default_rng(seed)
    groups = rng.random((grid.group_rows, grid.group_cols)) < share
    pictures = [rng.integers(0, 256, (grid.height, grid.width, 3)).astype(np.uint8) for _ in range(grid.temporal)]
    mask = group_mask(grid, np.argwhere(groups))
    patches = cut_patches(pictures, groups, grid)
    assert patches.dtype == np.uint8
    assert patches.shape == (mask.sum(), grid.temporal, 3, grid.patch, grid.patch)
    for number, (row, col) in enumerate(in_group_order(grid, mask)):
        top, left = row * grid.patch, col * grid.patch
        for t, picture in enumerate(pictures):
            tile = picture[top : top + grid.patch, left : left + grid.patch]
            assert np.array_equal(patches[number, t], tile.transpose(2, 0, 1))


@pytest.fixture
def noise_frame(make_frame, grid):
    def make(index, **given):
        rng = np.random.default_rng(index)
        frame = make_frame(rng.integers(0, 256, (grid.height, grid.width)).astype(np.uint8), index=index, **given)
        frame.rgb[:] = rng.integers(0, 256, frame.rgb.shape)
        return frame

    return make


def test_two_samples_make_one_frame_with_their_masks_united(noise_frame, grid):
    first, second = group_mask(grid, [(0, 0), (2, 5)]), group_mask(grid, [(0, 0), (3, 1)])
    none = np.zeros_like(first)
    sampler = PatchSampler("yard", Scripted([none, none, first, second]), fps=2.0)
    assert sampler.feed(noise_frame(0)) is None
    opening = sampler.feed(noise_frame(1))
    assert (opening.anchor, opening.fresh, opening.complete, opening.index) == (True, True, True, 0)
    frames = [noise_frame(2), noise_frame(3)]
    assert sampler.feed(frames[0]) is None
    sample = sampler.feed(frames[1])
    assert np.array_equal(sample.mask, first | second)
    assert (sample.stream, sample.index, sample.pts, sample.duration) == ("yard", 1, 1_000_000, 1_000_000)
    assert (sample.anchor, sample.fresh, sample.complete) == (False, False, False)
    assert sample.tokens == 3
    assert sample.activity == 1.0
    for t, frame in enumerate(frames):
        picture = np.zeros_like(frame.rgb)
        paste_patches(sample, t, picture)
        pixels = sample.mask.repeat(14, axis=0).repeat(14, axis=1)
        assert np.array_equal(picture[pixels], frame.rgb[pixels])
        assert not picture[~pixels].any()


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_complete_frame_reassembles_to_the_pictures(seed, noise_frame):
    sampler = PatchSampler("yard", make_pruner("none"), fps=2.0)
    frames = [noise_frame(0), noise_frame(1 + seed % 1000)]
    sampler.feed(frames[0])
    sample = sampler.feed(frames[1])
    for t, frame in enumerate(frames):
        picture = np.zeros_like(frame.rgb)
        paste_patches(sample, t, picture)
        assert np.array_equal(picture, frame.rgb)


def test_an_anchor_in_either_place_keeps_everything_of_both(noise_frame):
    for place in (2, 3):
        sampler = PatchSampler("yard", Scripted([]), fps=2.0)
        samples = [sampler.feed(noise_frame(index, anchor=index in (0, place))) for index in range(4)]
        assert samples[3].anchor
        assert samples[3].complete
        assert not samples[3].fresh


def test_a_frame_may_keep_nothing(noise_frame):
    sampler = PatchSampler("yard", Scripted([]), fps=2.0)
    samples = [sampler.feed(noise_frame(index)) for index in range(4)]
    assert samples[3].tokens == 0
    assert samples[3].patches.shape == (0, 2, 3, 14, 14)


def test_a_fresh_sample_drops_the_half_that_waits(noise_frame):
    sampler = PatchSampler("yard", Scripted([]), fps=2.0)
    sampler.feed(noise_frame(0))
    sampler.feed(noise_frame(1))
    assert sampler.feed(noise_frame(2)) is None
    assert sampler.feed(noise_frame(3, fresh=True, anchor=True)) is None
    sample = sampler.feed(noise_frame(4))
    assert (sample.fresh, sample.complete, sample.pts, sample.index) == (True, True, 1_500_000, 1)
    assert sampler.dropped == 1


def test_another_grid_drops_the_half_that_waits(make_frame):
    sampler = PatchSampler("yard", make_pruner("replenish"), fps=2.0)
    assert sampler.feed(make_frame(90)) is None
    wider = PatchGrid(8, 16, 14, 2, 2)
    assert sampler.feed(make_frame(90, index=1, on=wider, fresh=True, anchor=True)) is None
    assert sampler.feed(make_frame(90, index=2, on=wider)).grid == wider
    assert sampler.dropped == 1


def test_flush_repeats_the_last_picture(noise_frame):
    sampler = PatchSampler("yard", make_pruner("none"), fps=2.0)
    assert sampler.flush() is None
    frame = noise_frame(0)
    sampler.feed(frame)
    sample = sampler.flush()
    assert np.array_equal(sample.patches[:, 0], sample.patches[:, 1])
    assert sample.patches.shape[0] == 96
    assert sampler.flush() is None


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_forced_anchor_makes_the_very_next_frame_complete_behind_a_gap(noise_frame, waiting):
    pruner = Scripted([])
    sampler = PatchSampler("yard", pruner, fps=2.0)
    for index in range(2 + waiting):
        sampler.feed(noise_frame(index))
    sampler.force_anchor()
    samples = [sampler.feed(noise_frame(index)) for index in range(2 + waiting, 6)]
    first, *later = [sample for sample in samples if sample is not None]
    assert (first.fresh, first.gap, first.anchor, first.complete) == (False, True, True, True)
    assert first.activity == 1.0, "what changed in the frames that were missed, nobody has told"
    assert first.pts == 1_000_000
    assert pruner.seen[-1 if waiting else 3].anchor or pruner.seen[3].anchor
    assert not any(frame.random_access for frame in pruner.seen[1:]), "the camera is sound, its pruner forgets nothing"
    assert all((sample.gap, sample.anchor) == (False, False) for sample in later)


def test_one_sample_frames_for_models_without_temporal_patches(make_frame):
    grid = PatchGrid(8, 8, 14, 2, 1)
    sampler = PatchSampler("yard", make_pruner("none"), fps=4.0)
    sample = sampler.feed(make_frame(90, on=grid))
    assert sample.patches.shape == (64, 1, 3, 14, 14)
    assert sample.duration == 250_000


class Stepped(Scripted):
    """With a threshold that the ladder may raise."""

    knob = "level"

    def __init__(self, masks):
        super().__init__(masks)
        self.level = 4.0


def test_quality_is_a_factor_on_what_was_configured(noise_frame):
    pruner = Stepped([])
    sampler = PatchSampler("yard", pruner, fps=2.0)
    for prune, level in ((1.5, 6.0), (2.0, 8.0), (1.0, 4.0)):
        sampler.reconfigure(prune=prune, fps=2.0)
        assert pruner.level == level
    PatchSampler("yard", Scripted([]), fps=2.0).reconfigure(prune=1.5, fps=2.0)


def test_every_policy_of_the_registry_prunes_harder_or_has_nothing_to_turn(noise_frame):
    for name in ("replenish", "codecsight", "none"):
        pruner = make_pruner(name, {})
        before = getattr(pruner, pruner.knob) if pruner.knob else None
        PatchSampler("yard", pruner, fps=2.0).reconfigure(prune=2.0, fps=2.0)
        assert (before is None) == (name == "none")
        assert before is None or getattr(pruner, pruner.knob) == 2 * before


def test_a_sample_that_waits_for_its_pair_survives_another_rate(noise_frame, grid):
    """What the pruner kept of it counts as sent: were it dropped, those cells would stay as they were."""
    none, change = np.zeros((grid.rows, grid.cols), bool), group_mask(grid, [(1, 2)])
    sampler = PatchSampler("yard", Scripted([none, none, change, none, none, none]), fps=2.0)
    sampler.feed(noise_frame(0))
    assert sampler.feed(noise_frame(1)).duration == 1_000_000
    sampler.feed(noise_frame(2))
    sampler.reconfigure(prune=1.0, fps=1.0)
    # The next tick was due already; the one after it is a second later.
    sample = sampler.feed(noise_frame(3))
    assert np.array_equal(sample.mask, change)
    assert (sample.pts, sample.duration, sample.fresh) == (1_000_000, 1_500_000, False)
    sampler.feed(noise_frame(5))
    last = sampler.feed(noise_frame(7))
    assert (last.pts, last.duration, last.index) == (2_500_000, 2_000_000, 2)
    assert sampler.dropped == 0
