"""Counting a simulated city's windows: histograms, rows, and that nothing is settled twice."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.city.result import Figures, Objective
from cluster.lab.city.tally import PLACES, Lost, Tally, lag_bin, lag_quantile


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_quantiles_are_right_to_a_bin(lags, share):
    histogram = np.bincount(lag_bin(np.array(lags)), minlength=2000)
    exact = float(np.quantile(lags, share, method="inverted_cdf"))
    assert lag_quantile(histogram, share) == pytest.approx(exact, rel=0.012)


def test_no_windows_have_no_lag_and_tiny_ones_are_counted():
    assert lag_quantile(np.zeros(10, dtype=np.int64), 0.99) == 0.0
    assert 0 < lag_quantile(np.bincount(lag_bin(np.array([1e-9])), minlength=10), 0.5) <= 1e-4


def test_a_pool_that_nothing_was_asked_of_has_met_no_objective():
    idle = Figures.of(Tally(bins=2, bin_s=100.0, rungs=1))
    assert (idle.windows, idle.refused) == (0, 0)
    assert not Objective().met(idle)
    for name in ("on_time", "answered", "quality"):
        kept = replace(idle, on_time=1.0, answered=1.0, quality=1.0)
        assert Objective().met(kept)
        assert not Objective().met(replace(kept, **{name: getattr(idle, name)}))


def test_tallies_add_up():
    one, two = Tally(bins=1, bin_s=10.0, rungs=2), Tally(bins=1, bin_s=10.0, rungs=2)
    for tally in (one, two):
        tally.close(np.array([1.0, 2.0]), np.array([0, 1]), np.array([8.0, 16.0]), np.array([0, 1]))
    one.add(two)
    assert one.due.tolist() == [[2, 2, 0]]
    assert one.rung_s.tolist() == [[16.0, 32.0]]


def test_tables_hold_what_counting_one_by_one_gives():
    rng = np.random.default_rng(4)
    count, bins = 300, 5
    tally = Tally(bins=bins, bin_s=10.0, rungs=3)
    end_s, lag_s = rng.uniform(0, 60, count), rng.lognormal(1.0, 1.5, count)
    rank, rung = rng.integers(0, 3, count), rng.integers(0, 3, count)
    value_s, useful_s, stride_s = rng.uniform(0, 8, (3, count))
    tally.close(end_s, rank, stride_s, rung)
    tally.gate(end_s, rank, value_s)
    tally.answer(end_s, rank, lag_s, stride_s, value_s, useful_s)
    tally.drop(end_s, rank, Lost.SHED)
    wanted = Tally(bins=bins, bin_s=10.0, rungs=3)
    for at in range(count):
        cell = min(int(end_s[at] / 10), bins - 1), rank[at]
        done = min(int((end_s[at] + lag_s[at]) / 10), bins - 1)
        on_time = lag_s[at] <= stride_s[at]
        for table in (wanted.due, wanted.gated, wanted.answered):
            table[cell] += 1
        wanted.due_s[cell] += stride_s[at]
        wanted.rung_s[cell[0], rung[at]] += stride_s[at]
        wanted.on_time[cell] += on_time
        wanted.done[done, rank[at]] += 1
        wanted.useful_s[done] += useful_s[at] * on_time
        wanted.lags[(*cell, lag_bin(lag_s[at]))] += 1
        wanted.dropped[(*cell, PLACES[Lost.SHED])] += 1
    # What is answered adds to what the gate holds, in that order.
    for at in [*range(count), *range(count)]:
        wanted.value_s[min(int(end_s[at] / 10), bins - 1), rank[at]] += value_s[at]
    for name, table in vars(wanted).items():
        assert np.array_equal(getattr(tally, name), table), name
