"""The video-level rule and its measures, against cases counted by hand and against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.evaluation.metrics import (
    Decisions,
    accuracy,
    estimate,
    f1_drop,
    mean_over_kinds,
    recall_drop,
    terciles,
    video_score,
)

SHARES = st.floats(0, 1)


def decisions(truth, positive, judged=None, kinds=None):
    truth, positive = np.array(truth, dtype=bool), np.array(positive, dtype=bool)
    names = kinds or tuple(f"kind {i}" for i in range(truth.shape[1]))
    return Decisions(names, truth, positive, np.ones_like(truth) if judged is None else np.array(judged, dtype=bool))


def test_two_in_a_row_make_a_video_positive():
    assert video_score([0.9, 0.2, 0.9, 0.8, 0.1]) == 0.8
    assert video_score([0.9, 0.1, 0.9, 0.1]) == 0.1
    assert video_score([0.9, 0.1, 0.9, 0.1], consecutive=1) == 0.9
    assert video_score([0.9]) == -math.inf
    assert video_score([]) == -math.inf
    with pytest.raises(ValueError, match="at least one window"):
        video_score([0.5], consecutive=0)


@given(st.lists(SHARES, max_size=12), st.integers(1, 4), SHARES)
def test_score_is_the_rule_at_every_threshold(scores, consecutive, threshold):
    run = longest = 0
    for score in scores:
        run = run + 1 if score >= threshold else 0
        longest = max(longest, run)
    assert (video_score(scores, consecutive) >= threshold) == (longest >= consecutive)


def test_counts_by_hand():
    # Kind 0: found, missed, false alarm, quiet. Kind 1: found twice, quiet twice.
    found = accuracy(decisions([[1, 1], [1, 0], [0, 1], [0, 0]], [[1, 1], [0, 0], [1, 1], [0, 0]]))
    assert found.by_kind["kind 0"].value == pytest.approx(2 / 4)
    assert (found.precision_by_kind["kind 0"], found.recall_by_kind["kind 0"]) == (0.5, 0.5)
    assert found.by_kind["kind 1"].value == 1
    assert found.f1.value == pytest.approx(0.75)
    assert found.worst == pytest.approx(0.5)
    assert found.pooled_f1.value == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert found.pooled_recall.value == pytest.approx(3 / 4)
    assert (found.videos, found.events) == (4, 4)


def test_a_kind_that_never_happens_is_not_a_kind_one_fails_at():
    found = accuracy(decisions([[1, 0], [0, 0]], [[1, 1], [0, 0]]))
    assert math.isnan(found.by_kind["kind 1"].value)
    assert found.f1.value == 1
    missed = accuracy(decisions([[1], [0]], [[0], [0]]))
    assert (missed.f1.value, missed.precision.value, missed.recall.value) == (0, 0, 0)
    nothing = accuracy(decisions([[0], [0]], [[0], [1]]))
    assert math.isnan(nothing.f1.value)
    assert math.isnan(nothing.worst)


def test_a_video_counts_only_for_what_it_is_judged_on():
    found = accuracy(decisions([[1, 0], [0, 1]], [[1, 1], [1, 1]], judged=[[1, 0], [0, 1]]))
    assert found.by_kind["kind 0"].value == found.by_kind["kind 1"].value == 1
    assert found.events == 2


@given(st.integers(0, 2**32 - 1))
def test_resampling_a_video_n_times_is_having_it_n_times(seed):
    rng = np.random.default_rng(seed)
    truth, positive, judged = rng.random((3, 7, 2)) < 0.5
    weights = rng.integers(0, 4, 7)
    once = Decisions(("a", "b"), truth, positive, judged).counts(weights[None].astype(float))
    repeated = Decisions(("a", "b"), *(np.repeat(each, weights, axis=0) for each in (truth, positive, judged)))
    counts = repeated.counts(np.ones((1, len(repeated))))
    for name in ("tp", "fp", "fn"):
        assert getattr(once, name).tolist() == getattr(counts, name).tolist()


def test_interval_holds_the_value_and_narrows_with_videos():
    rng = np.random.default_rng(1)
    truth = rng.random((400, 2)) < 0.5
    positive = truth ^ (rng.random((400, 2)) < 0.1)
    widths = []
    for count in (40, 400):
        found = accuracy(decisions(truth[:count], positive[:count]))
        value, low, high = found.f1
        assert low <= value <= high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
    again = accuracy(decisions(truth[:40], positive[:40]))
    assert again.f1 == accuracy(decisions(truth[:40], positive[:40])).f1


def test_two_videos_have_no_interval():
    found = accuracy(decisions([[1], [0]], [[1], [0]]))
    assert found.f1.value == 1
    assert math.isnan(found.f1.low)
    assert all(math.isnan(end) for end in estimate(np.array([1.0, np.nan, np.nan]))[1:])


def test_drops_are_paired():
    rng = np.random.default_rng(2)
    truth = rng.random((60, 1)) < 0.5
    noisy = truth ^ (rng.random((60, 1)) < 0.2)
    full, same = decisions(truth, noisy), decisions(truth, noisy)
    assert f1_drop(full, same) == (0, 0, 0)
    worse = noisy.copy()
    worse[np.flatnonzero(truth[:, 0] & noisy[:, 0])[:10]] = False
    drop = f1_drop(full, decisions(truth, worse))
    assert drop.value == pytest.approx(accuracy(full).f1.value - accuracy(decisions(truth, worse)).f1.value)
    assert 0 < drop.low <= drop.value <= drop.high
    recall = recall_drop(full, decisions(truth, worse))
    assert recall.value == pytest.approx(10 / truth.sum())
    with pytest.raises(ValueError, match="same videos"):
        f1_drop(full, decisions(truth[:5], noisy[:5]))


def test_mean_leaves_out_what_is_undefined():
    values = np.array([[1.0, np.nan, 0.0], [np.nan, np.nan, np.nan]])
    found = mean_over_kinds(values)
    assert found[0] == 0.5
    assert math.isnan(found[1])


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_terciles_part_the_videos_in_order(motion):
    low, medium, high = terciles(motion)
    assert (low.astype(int) + medium + high == 1).all()
    assert max(low.sum(), medium.sum(), high.sum()) - min(low.sum(), medium.sum(), high.sum()) <= 1
    values = np.array(motion)
    for below, above in ((low, medium), (medium, high), (low, high)):
        if below.any() and above.any():
            assert values[below].max() <= values[above].min()
