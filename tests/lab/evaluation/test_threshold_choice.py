"""The chosen threshold is the best there is, and stands in the middle of its plateau."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.evaluation.calibration import choose_threshold, fit_thresholds, mean_in_logits
from cluster.lab.evaluation.metrics import Decisions, accuracy


def f1_at(threshold, scores, truth, judged):
    kinds = tuple(str(i) for i in range(truth.shape[1]))
    return accuracy(Decisions(kinds, truth, scores >= threshold, judged), resamples=0).f1.value


def test_between_what_it_must_part():
    scores = np.array([[0.1], [0.2], [0.8], [0.9]])
    truth = np.array([[False], [False], [True], [True]])
    threshold, f1 = choose_threshold(scores, truth, np.ones_like(truth))
    assert f1 == 1
    # Halfway on the logistic scale: logit 0.2 and logit 0.8 are opposite.
    assert threshold == pytest.approx(0.5)


def test_the_wider_of_two_plateaus():
    # Between 0.30 and 0.32 both events are found with two false alarms, above 0.5 one with none: F1 is 2/3 at both.
    scores = np.array([[0.30], [0.32], [0.5], [0.5], [0.9]])
    truth = np.array([[False], [True], [False], [False], [True]])
    threshold, f1 = choose_threshold(scores, truth, np.ones_like(truth))
    assert f1 == pytest.approx(2 / 3)
    # Halfway between logit 0.5 = 0 and logit 0.9 = ln 9: odds of 3.
    assert threshold == pytest.approx(0.75)


def test_all_scores_alike():
    threshold, f1 = choose_threshold(np.full((3, 1), 0.7), np.array([[True], [False], [True]]), np.ones((3, 1), bool))
    assert f1 == pytest.approx(0.8)
    assert 0 < threshold < 0.7


def test_without_events_there_is_nothing_to_choose_on():
    with pytest.raises(ValueError, match="no video has an event"):
        choose_threshold(np.full((2, 1), 0.5), np.zeros((2, 1), bool), np.ones((2, 1), bool))


def test_each_kind_by_itself_if_it_happens_often_enough():
    scores = np.repeat([[0.2, 0.7, 0.5], [0.4, 0.9, 0.6], [0.1, 0.6, 0.5]], 8, axis=0)
    truth = np.repeat([[False, False, False], [True, True, False], [False, False, False]], 8, axis=0)
    truth[8:15, 2] = True
    results = SimpleNamespace(kinds=("low", "high", "rare"), truth=truth, judged=np.ones_like(truth))
    common, f1, chosen = fit_thresholds(results, scores)
    assert (common, f1) == choose_threshold(scores, truth, results.judged)
    assert chosen.keys() == {"low", "high"}
    assert mean_in_logits(common, 0.2) < chosen["low"] < mean_in_logits(common, 0.4)
    assert mean_in_logits(common, 0.7) < chosen["high"] < mean_in_logits(common, 0.9)


@given(st.integers(0, 2**32 - 1))
def test_no_other_threshold_is_better(seed):
    rng = np.random.default_rng(seed)
    videos = int(rng.integers(1, 12))
    scores = np.round(rng.random((videos, 2)), 2)
    scores[rng.random((videos, 2)) < 0.1] = -math.inf
    truth, judged = rng.random((2, videos, 2)) < 0.5
    if not (truth & judged).any():
        return
    threshold, f1 = choose_threshold(scores, truth, judged)
    assert 0 < threshold < 1
    assert f1_at(threshold, scores, truth, judged) == pytest.approx(f1)
    assert max(f1_at(t, scores, truth, judged) for t in np.linspace(0.005, 0.995, 100)) <= f1 + 1e-9
