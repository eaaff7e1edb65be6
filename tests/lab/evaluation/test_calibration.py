"""Bins of the score: merged until full, monotone within noise or not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.evaluation.calibration import calibrate, isotonic, wilson


def windows(*bins):
    """Scores and labels from (score, windows, events)."""
    scores = [np.full(count, score) for score, count, _ in bins]
    labels = [np.arange(count) < events for _, count, events in bins]
    return np.concatenate(scores), np.concatenate(labels)


def test_a_rising_rate_is_monotone():
    found = calibrate(*windows((0.05, 100, 5), (0.45, 100, 40), (0.95, 100, 92)))
    assert [(b.low, b.high, b.windows, b.rate) for b in found.bins] == [
        (0.0, 0.1, 100, 0.05),
        (0.1, 0.5, 100, 0.4),
        (0.5, 1.0, 100, 0.92),
    ]
    assert found.monotone == 1
    assert found.ece == pytest.approx((0 + 0.05 + 0.03) / 3)


def test_a_small_dip_is_noise_and_a_large_one_is_not():
    assert calibrate(*windows((0.1, 40, 20), (0.5, 40, 18), (0.9, 40, 30))).monotone == 1
    assert calibrate(*windows((0.1, 400, 240), (0.5, 400, 120), (0.9, 400, 300))).monotone == 0


def test_thin_bins_join_their_neighbours():
    found = calibrate(*windows((0.05, 30, 0), (0.25, 5, 1), (0.55, 16, 8), (0.95, 7, 7)))
    # 0.25 and 0.55 are 21 together; the 7 at the top are too few and join them.
    assert [(b.low, b.high, b.windows) for b in found.bins] == [(0.0, 0.1, 30), (0.1, 1.0, 28)]


def test_too_little_to_tell():
    for found in (calibrate(*windows((0.2, 10, 2))), calibrate(*windows((0.2, 40, 2)))):
        assert math.isnan(found.monotone)
    empty = calibrate(np.zeros(0), np.zeros(0, bool))
    assert (empty.bins, empty.windows) == ((), 0)
    assert math.isnan(empty.ece)


def test_a_score_of_one_is_in_the_last_bin():
    found = calibrate(*windows((0.0, 25, 0), (1.0, 25, 25)))
    assert [(b.low, b.windows, b.rate) for b in found.bins] == [(0.0, 25, 0.0), (0.1, 25, 1.0)]


def test_isotonic_by_hand():
    assert isotonic(np.array([1.0, 3.0, 2.0, 4.0]), np.array([1.0, 1.0, 3.0, 1.0])).tolist() == [1, 2.25, 2.25, 4]


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50)), min_size=1, max_size=10))
def test_isotonic_rises_keeps_the_mean_and_is_the_nearest(pairs):
    values = np.array([value for value, _ in pairs])
    weights = np.array([weight for _, weight in pairs], dtype=float)
    fit = isotonic(values, weights)
    assert (np.diff(fit) >= -1e-12).all()
    assert (fit * weights).sum() == pytest.approx((values * weights).sum())
    error = (weights * (fit - values) ** 2).sum()
    rng = np.random.default_rng(0)
    for _ in range(20):
        other = np.sort(rng.random(len(values)))
        assert error <= (weights * (other - values) ** 2).sum() + 1e-9


def test_wilson_by_hand():
    # 8 of 10, the textbook's example: 0.490 to 0.943.
    low, high = wilson(np.array([0.8, 0.0, 1.0]), np.array([10.0, 10.0, 10.0]))
    assert (low[0], high[0]) == (pytest.approx(0.490, abs=1e-3), pytest.approx(0.943, abs=1e-3))
    assert (low[1], high[2]) == (0, 1)
