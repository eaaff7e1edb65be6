"""What cameras ask for: hand-computed work, and estimates that follow what is counted within bounds."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_parts import LADDER, costs, demand

from cluster.control.costs import WindowWork
from cluster.control.demand import MOST, DemandEstimate, Measured, load, stride_at, work
from cluster.control.ladder import Rung, default

FULL, PRUNE, STRIDE, SHED = LADDER.rungs


def test_work_by_hand() -> None:
    # Two samples a second make a frame a second; one in four is an anchor of 100 tokens, the others keep 20.
    camera = demand(
        window_s=8.0, stride_s=2.0, fps=2.0, frame_tokens=100, kept=0.2, anchor_interval_s=4.0, questions=2,
        query_tokens=10,
    )  # fmt: skip
    # 40 tokens a frame: 320 in the window, 80 new, and of the 240 others the anchors' share, 25 of 40, again: all of
    # them in every other window, as an anchor opens two.
    found = work(camera, FULL)
    assert found.encoded == pytest.approx(80)
    assert found.computed == pytest.approx(80 + 150 / 2 + 20)
    assert found.attended == pytest.approx(80 * 280 + 150 / 2 * 120 + 20 * 320)
    # Pruned to 0.8 of that: 32 a frame, of which 25 are anchors'.
    pruned = work(camera, PRUNE)
    assert pruned.encoded == pytest.approx(64)
    assert pruned.computed == pytest.approx(64 + 192 * 25 / 32 / 2 + 20)
    assert work(camera, FULL, gated=0, missed=1).computed == pytest.approx(160 + 100 + 20)
    assert work(camera, Rung("r", refresh_budget=0.0)).computed == pytest.approx(80 + 20)
    # Half the rate: half the frames, of which half are anchors of all 100 tokens, so that no fewer can be kept than 50.
    assert work(camera, Rung("r", fps=0.5)).encoded == pytest.approx(50)
    assert work(camera, Rung("r", fps=0.5, kept=1.5)).encoded == pytest.approx(60)
    assert work(camera, SHED) == WindowWork(0, 0, 0)


def test_frames_of_strides_before_are_computed_with_the_next_window() -> None:
    # 20 frames of a window of 20 s, 4 of a stride; an anchor of 100 tokens every stride, 10 of each other frame.
    camera = demand(window_s=20.0, stride_s=4.0, fps=2.0, frame_tokens=100, kept=0.1, anchor_interval_s=4.0)
    assert work(camera, FULL).encoded == pytest.approx(100 + 30)
    # A gated stride left its anchor, which is then new and not refreshed; no more than the four that overlap.
    for gated, deferred in ((1, 100), (3, 300), (4, 400), (9, 400)):
        found = work(camera, FULL, gated=gated)
        assert found.encoded == pytest.approx(130 + deferred)
        assert found.computed == pytest.approx(130 + 400 + 20)
    # A dropped one left everything that it keeps.
    assert work(camera, FULL, missed=2).encoded == pytest.approx(3 * 130)
    assert work(camera, FULL, missed=9).encoded == pytest.approx(5 * 130)
    assert work(camera, FULL, gated=9, missed=3).encoded == pytest.approx(4 * 130 + 100)
    # Half of the windows are gated: 1/2 + 1/4 + 1/8 + 1/16 of an anchor is expected.
    assert work(replace(camera, busy=0.5), FULL).encoded == pytest.approx(130 + 100 * 15 / 16)
    # In stretches of four on average, one computed window in four follows gated ones: 1 + 3/4 + 9/16 + 27/64 overlap.
    stretches = replace(camera, busy=0.5, resumed=0.25, gated=4.0)
    assert work(stretches, FULL).encoded == pytest.approx(130 + 100 / 4 * (1 + 3 / 4 + 9 / 16 + 27 / 64))
    assert work(replace(camera, busy=1.0, resumed=0.0), FULL) == work(camera, FULL)
    # A stride of twice that has two anchors, and one such stride overlaps whole.
    assert work(replace(camera, busy=0.5), Rung("r", stride=2.0)).encoded == pytest.approx(260 + 200 / 2)


def test_anchors_stay_whole_however_hard_the_rest_is_pruned() -> None:
    camera = demand(window_s=8.0, stride_s=2.0, fps=2.0, frame_tokens=100, kept=0.2, anchor_interval_s=4.0)
    assert work(camera, Rung("r", kept=0.01)).encoded == pytest.approx(2 * 25)


def test_load_counts_rate_gate_and_a_share_of_the_step() -> None:
    model = costs(step_s=0.08, window_s=0.1)
    assert load(demand(stride_s=2.0), FULL, model) == pytest.approx(0.11 / 2)
    assert load(demand(stride_s=2.0), STRIDE, model) == pytest.approx(0.11 / 4)
    assert load(demand(stride_s=2.0, busy=0.5, rate=3.0), FULL, model) == pytest.approx(3 * 0.055 / 2)
    assert load(demand(), SHED, model) == 0


@pytest.mark.parametrize(("window_s", "stride_s"), [(5.0, 2.0), (2.0, 2.0), (1.5, 1.5), (1.0, 1.0)])
def test_a_rung_stretches_a_stride_to_the_window_at_most(window_s, stride_s) -> None:
    """As decoders do (``stream_spec_at``); otherwise the same windows would count as twice the rate."""
    camera = demand(window_s=window_s)
    assert stride_at(camera, STRIDE) == pytest.approx(stride_s)
    assert load(camera, STRIDE, costs()) == pytest.approx(0.1 / stride_s)
    estimate = DemandEstimate(camera)
    for _ in range(200):
        estimate.observe_counts(Measured(stride_s, 1), STRIDE)
    assert estimate.demand.rate == pytest.approx(1.0)


@given(st.floats(0, 1), st.floats(0.5, 8), st.floats(2, 40), st.integers(1, 6))
def test_no_rung_asks_for_more_than_the_one_above_it(kept, fps, interval, questions) -> None:
    model = costs(step_s=0.01, encoded_s=1e-4, computed_s=1e-4, attended_s=1e-8)
    camera = demand(stride_s=4.0, window_s=40.0, fps=fps, kept=kept, anchor_interval_s=interval, questions=questions)
    loads = [load(camera, rung, model) for rung in default().rungs]
    assert all(lower <= upper * (1 + 1e-9) for upper, lower in itertools.pairwise(loads))


def counted(estimate: DemandEstimate, strides: int, **counts) -> None:
    for _ in range(strides):
        estimate.observe_counts(Measured(1.0, **counts), FULL)


def test_counts_replace_what_was_declared() -> None:
    estimate = DemandEstimate(demand(busy=1.0, kept=0.9, anchor_interval_s=4.0))
    for window in range(2400):
        gated = window % 4 != 0
        resumed = int(not gated)
        counts = Measured(1.0, 1, int(gated), 100 * resumed, 40 * resumed, resumed=resumed)
        estimate.observe_counts(counts, FULL)
    found = estimate.demand
    assert found.rate == pytest.approx(1.0)
    assert found.busy == pytest.approx(0.25, abs=0.03)
    assert (found.resumed, found.gated) == (pytest.approx(1.0, abs=0.01), pytest.approx(3.0, abs=0.05))
    # A quarter of the frames are anchors: 0.25 + 0.75 * kept = 0.4.
    assert found.kept == pytest.approx(0.2, abs=0.01)


def test_kept_tokens_are_read_as_of_the_rung_they_were_counted_at() -> None:
    estimate = DemandEstimate(demand(kept=0.9, anchor_interval_s=4.0))
    for _ in range(600):
        estimate.observe_counts(Measured(1.0, 1, 0, 100, 32), Rung("r", kept=0.8))
    assert estimate.demand.kept == pytest.approx(0.2, abs=0.001)


def test_a_camera_that_sends_ten_times_its_rate_counts_ten_times_and_never_more_than_the_bound() -> None:
    estimate = DemandEstimate(demand())
    counted(estimate, 600, windows=2, dropped=8)
    assert estimate.demand.rate == pytest.approx(10, rel=0.01)
    counted(estimate, 600, windows=10**9)
    assert estimate.demand.rate <= MOST


def test_a_camera_that_never_sends_comes_to_ask_for_nothing() -> None:
    estimate = DemandEstimate(demand(busy=0.5))
    counted(estimate, 600, windows=0)
    assert estimate.demand.rate < 0.01
    assert estimate.demand.busy == 0.5, "nothing was learnt of what it would do"


def test_heartbeats_shorter_than_a_stride_are_put_together() -> None:
    often, seldom = DemandEstimate(demand(stride_s=8.0)), DemandEstimate(demand(stride_s=8.0))
    for second in range(160):
        often.observe_counts(Measured(1.0, int(second % 8 == 0), int(second % 16 == 0)), FULL)
        if second % 8 == 7:
            seldom.observe_counts(Measured(8.0, 1, int(second % 16 == 7)), FULL)
    assert often.demand == seldom.demand


def test_counts_of_two_rungs_are_put_together_by_the_strides_they_cover() -> None:
    """A camera that changes its rung more often than once a stride would otherwise never be measured."""
    estimate = DemandEstimate(demand(stride_s=8.0, window_s=40.0, kept=0.9, anchor_interval_s=4.0))
    other = Rung("r", kept=0.5, stride=2.0)
    for _ in range(400):
        # Half of a stride of 8 s, and half of one of 16 s: a window in all, of 40 of 100 tokens at full quality.
        estimate.observe_counts(Measured(4.0, 0, 0, 50, 20), FULL)
        estimate.observe_counts(Measured(8.0, 1, 0, 50, 10), other)
    assert estimate.demand.rate == pytest.approx(1.0, abs=0.01)
    assert estimate.demand.kept == pytest.approx(0.2, abs=0.01)


def test_what_makes_no_sense_changes_nothing() -> None:
    estimate = DemandEstimate(demand())
    before = estimate.demand
    assert not estimate.observe_counts(Measured(0.0, 5), FULL)
    assert not estimate.observe_counts(Measured(-3.0, 5), FULL), "a clock was set back"
    assert not estimate.observe_counts(Measured(8.0, 0), SHED), "one that is shed sends nothing"
    assert estimate.demand == before


def test_pictures_speak_first_and_counts_have_the_last_word() -> None:
    estimate = DemandEstimate(demand())
    assert estimate.observe_activity(2.0)
    assert estimate.demand.kept == 1.0
    assert estimate.observe_activity(0.1)
    assert estimate.demand.kept == pytest.approx(0.12)
    counted(estimate, 1, windows=1)
    assert not estimate.observe_activity(0.9)
