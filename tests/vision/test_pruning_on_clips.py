"""Do the policies keep what moves in real bitstreams, and little else? The truth is what the clips were drawn from."""

import numpy as np
import pytest
from street_footage import make_all_clips, sample_file

from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """At 6 frames per second samples fall on the instants of the truth, twice a second."""
    return make_all_clips(tmp_path_factory.mktemp("clips"), fps=6.0)


@pytest.fixture(scope="module")
def sampled(clips):
    return {kind: sample_file(path) for kind, path in clips.items()}


MOVERS = ["street", "noisy", "hevc"]


def prune_clip(frames, policy, options=None):
    """(non-anchor samples' masks with their frames, kept share of all tokens of the frames sent)."""
    pruner = make_pruner(policy, options)
    masks = [(frame, pruner.prune(frame).mask) for frame in frames]
    sampler = PatchSampler("clip", make_pruner(policy, options), fps=2.0)
    sent = [sample for frame in frames if (sample := sampler.feed(frame)) is not None]
    kept = sum(sample.tokens for sample in sent) / sum(sample.grid.tokens for sample in sent)
    return [(frame, mask) for frame, mask in masks if not frame.anchor], kept


def covered_groups(grid, truth, box):
    """Groups of which the box covers more than a quarter, ``[group rows, group cols]``."""
    left, top, right, bottom = box
    cols = np.arange(grid.group_cols) * truth.width / grid.group_cols
    rows = np.arange(grid.group_rows) * truth.height / grid.group_rows
    wide, high = truth.width / grid.group_cols, truth.height / grid.group_rows
    across = np.clip(np.minimum(right, cols + wide) - np.maximum(left, cols), 0, None) / wide
    down = np.clip(np.minimum(bottom, rows + high) - np.maximum(top, rows), 0, None) / high
    return np.outer(down, across) > 0.25


def recall(pruned, truth):
    hit = total = 0
    for frame, mask in pruned:
        kept = mask[:: frame.grid.merge, :: frame.grid.merge]
        for thing in truth.at(frame.pts / 1e6):
            if thing.moving:
                groups = covered_groups(frame.grid, truth, thing.box)
                hit += int((kept & groups).sum())
                total += int(groups.sum())
    assert total > 150
    return hit / total


@pytest.mark.parametrize("kind", MOVERS)
def test_replenish_keeps_the_movers_at_a_fraction_of_the_tokens(kind, sampled, clips):
    pruned, kept = prune_clip(sampled[kind], "replenish")
    assert recall(pruned, SceneTruth.load(truth_path(clips[kind]))) >= 0.95
    assert kept < 0.24
    assert np.mean([mask.mean() for _, mask in pruned]) < 0.10


def test_codecsight_keeps_the_movers_too_where_there_are_vectors(sampled, clips):
    pruned, _ = prune_clip(sampled["street"], "codecsight")
    assert recall(pruned, SceneTruth.load(truth_path(clips["street"]))) >= 0.95


def test_noise_defeats_any_vector_and_not_replenishment(sampled):
    _, published = prune_clip(sampled["noisy"], "codecsight")
    _, ours = prune_clip(sampled["noisy"], "replenish")
    assert published > 0.85
    assert ours < published / 3


def test_a_still_night_costs_its_anchors(sampled):
    pruned, kept = prune_clip(sampled["night"], "replenish")
    assert np.mean([mask.mean() for _, mask in pruned]) < 0.05
    anchors = np.mean([frame.anchor for frame in sampled["night"]])
    assert kept < 2 * anchors + 0.05


def test_a_still_night_is_inactive(sampled):
    pruner = make_pruner("replenish")
    activity = [pruner.prune(frame).activity for frame in sampled["night"]]
    assert activity[0] == 1.0
    assert max(activity[1:]) < 0.01


@pytest.mark.parametrize(("restate", "share"), [(0, 0.0), (2, 0.5)])
def test_standing_people_are_shown_as_often_as_asked(sampled, clips, restate, share):
    """Who stopped two seconds ago, with nobody near, has been seen."""
    truth = SceneTruth.load(truth_path(clips["street"]))
    pruned, _ = prune_clip(sampled["street"], "replenish", {"restate": restate})
    kept = []
    for frame, mask in pruned:
        second = frame.pts / 1e6
        before = {thing.id for thing in truth.at(second - 2.0) if not thing.moving}
        near = np.zeros((frame.grid.group_rows, frame.grid.group_cols), bool)
        for thing in truth.at(second):
            if thing.moving:
                left, top, right, bottom = thing.box
                near |= covered_groups(frame.grid, truth, (left - 60, top - 60, right + 60, bottom + 60))
        for thing in truth.at(second):
            if not thing.moving and thing.id in before:
                groups = covered_groups(frame.grid, truth, thing.box) & ~near
                kept += mask[::2, ::2][groups].tolist()
    assert len(kept) >= 8
    assert np.mean(kept) == pytest.approx(share, abs=0.05)
