"""Masks of training sequences: by brute force over the pixels, and as the live sampler cuts them."""

import numpy as np
import pytest

from cluster.lab.scenes.scene import make_scene
from cluster.lab.training.config import Shape
from cluster.lab.training.pruning import (
    ImageDegradation,
    Pruning,
    RenderedSample,
    prune_samples,
    render_samples,
    sample_times,
    to_luma,
)
from cluster.types import PatchGrid

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def samples(shape: Shape) -> list[RenderedSample]:
    scene = make_scene("train", 18, event="intrusion")
    return render_samples(scene, shape, [k / 2 for k in range(10, 44)], ImageDegradation())


def kept(frame, grid: PatchGrid) -> np.ndarray:
    mask = np.zeros((grid.group_rows, grid.group_cols), bool)
    mask[tuple(frame.cells.T)] = True
    return mask


def test_anchors_are_complete_and_stand_where_the_clock_says(samples, grid: PatchGrid) -> None:
    pruning = Pruning("replenish", anchor=5, phase=3)
    frames = prune_samples(samples, [], grid, pruning, RNG)
    assert [i for i, frame in enumerate(frames) if frame.complete] == [0, 3, 8, 13]
    assert all(len(frame.cells) == grid.tokens for frame in frames if frame.complete)
    assert [frame.time_s for frame in frames] == [sample.second for sample in samples[::2]]


def test_codecsight_keeps_what_changed_since_the_anchor(samples, grid: PatchGrid) -> None:
    """By brute force: a group is kept once one of its cells differed too much from the sample before."""
    margin = 12.0
    frames = prune_samples(samples, [], grid, Pruning("codecsight", margin, anchor=100, phase=99), RNG)
    lumas = [to_luma(sample.rgb).astype(int) for sample in samples]
    active = np.zeros((grid.group_rows, grid.group_cols), bool)
    size = grid.patch
    for index in range(1, len(samples)):
        for row in range(grid.rows):
            for col in range(grid.cols):
                here = np.s_[row * size : (row + 1) * size, col * size : (col + 1) * size]
                if np.abs(lumas[index][here] - lumas[index - 1][here]).mean() > margin + 1.0:
                    active[row // 2, col // 2] = True
        if index % 2 and index > 1:
            assert (kept(frames[index // 2], grid) == active).all(), index
    assert 0 < len(frames[1].cells) < grid.tokens
    assert len(frames[1].cells) < active.sum()


def test_replenishment_keeps_a_group_that_looks_otherwise_than_when_it_was_kept(samples, grid: PatchGrid) -> None:
    """Whatever is not kept still looks, up to the highest threshold, as when it was: nothing is ever lost."""
    frames = prune_samples(samples, [], grid, Pruning("replenish", 4.5, anchor=100, phase=99), RNG)
    assert any(0 < len(frame.cells) < grid.tokens for frame in frames)
    memory = to_luma(samples[0].rgb).astype(float)
    size = grid.patch * grid.merge
    for index, frame in enumerate(frames):
        mask = kept(frame, grid)
        now = to_luma(samples[2 * index + 1].rgb).astype(float)
        for row, col in np.argwhere(~mask):
            here = np.s_[row * size : (row + 1) * size, col * size : (col + 1) * size]
            # Twice the highest threshold, and the brightness it forgives.
            assert np.abs(now[here] - memory[here]).mean() < 2 * 14.0 + 0.04 * 255
        for row, col in np.argwhere(mask):
            here = np.s_[row * size : (row + 1) * size, col * size : (col + 1) * size]
            memory[here] = now[here]


def test_nothing_pruned_is_everything(samples, grid: PatchGrid) -> None:
    frames = prune_samples(samples, [], grid, Pruning("none"), RNG)
    assert all(frame.complete and len(frame.cells) == grid.tokens for frame in frames)
    # Group order: the first group's four patches are the picture's upper left corner.
    patch = samples[0].rgb[: grid.patch, grid.patch : 2 * grid.patch].transpose(2, 0, 1)
    assert (frames[0].patches[1, 0] == patch).all()


def test_losses_spare_anchors_and_take_their_share(samples, grid: PatchGrid) -> None:
    whole = prune_samples(samples, [], grid, Pruning("replenish", anchor=4, phase=0), np.random.default_rng(1))
    less = prune_samples(samples, [], grid, Pruning("replenish", anchor=4, phase=0, loss=0.5), np.random.default_rng(1))
    assert [f.complete for f in less] == [f.complete for f in whole]
    before = sum(len(f.cells) for f in whole if not f.complete)
    after = sum(len(f.cells) for f in less if not f.complete)
    assert 0.3 * before < after < 0.7 * before
    for frame, full in zip(less, whole, strict=True):
        assert {*map(tuple, frame.cells)} <= {*map(tuple, full.cells)}
        assert len(frame.patches) == 4 * len(frame.cells) == 4 * len(frame.labels.hot)


def test_samples_keep_an_even_pace_on_a_cameras_clock() -> None:
    for seed in range(20):
        times = sample_times(40.0, 2.0, np.random.default_rng(seed))
        assert len(times) % 2 == 0
        assert len(times) in (78, 80)
        assert np.abs(np.diff(times) - 0.5).max() <= 0.1 + 1e-9
        assert 0 <= times[0] <= 0.55
        assert times[-1] < 40.05
