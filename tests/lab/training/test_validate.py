"""Metrics against brute force."""

import numpy as np
import pytest

from cluster.lab.training.run import auc, best_f1


@pytest.mark.parametrize("seed", range(20))
def test_auc_counts_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Few distinct scores: many ties.
    scores, truth = rng.integers(0, 6, 40).astype(float), rng.random(40) < 0.4
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[truth] for n in scores[~truth]]
    assert auc(scores, truth) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("seed", range(20))
def test_best_f1_tries_every_threshold(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, truth = rng.integers(0, 8, 30).astype(float), rng.random(30) < 0.3
    truth[0] = True

    def f1(threshold: float) -> float:
        found = scores >= threshold
        return 2 * float((found & truth).sum()) / float(found.sum() + truth.sum())

    assert best_f1(scores, truth) == pytest.approx(max(f1(t) for t in scores))


def test_where_one_answer_never_occurs_nothing_can_be_said() -> None:
    assert np.isnan(auc(np.array([1.0, 2.0]), np.array([True, True])))
    assert np.isnan(auc(np.array([1.0, 2.0]), np.array([False, False])))
    assert np.isnan(best_f1(np.array([1.0, 2.0]), np.array([False, False])))
