"""The fleet: admission that tells the truth, replicas that come, go and are drained, and what ticks decide."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scheduling_parts import LADDER, costs, demand, fleet

from cluster.control.admission import expected_lag_s
from cluster.control.costs import CostModel
from cluster.control.demand import Demand, Measured, load
from cluster.control.fleet import NOTICED, Fleet
from cluster.control.ladder import CameraOnLadder, Ladder, LadderPolicy
from cluster.errors import UnknownCameraError
from cluster.lab.city.district import District
from cluster.lab.city.mix import BurstPeriod, CameraClass, Mix
from cluster.lab.city.plan import FULL, CityPlan, PoolPlan, Timing
from cluster.lab.city.replica import EngineSettings
from cluster.lab.city.tally import LAG_BINS, LEAST_S, PER_DECADE, by_reason, lag_quantile
from cluster.types.cameras import Priority


def settled(made: Fleet, until_s: float) -> list:
    """Every replica is as busy as predicted, says so once a second, and nothing waits."""
    steps = []
    for second in range(int(until_s)):
        for name in made.replicas:
            mine = [camera for camera in made.cameras if made.plan(camera).owner == name]
            rungs = {camera: LADDER.rungs[LADDER.index_of(made.plan(camera).rung)] for camera in mine}
            share = sum(load(made._cameras[camera].estimate.demand, rung, costs()) for camera, rung in rungs.items())
            made.replica_report(name, busy_share=min(1.0, share), backlog_s=0.0, now_s=float(second))
        steps += made.tick(float(second))
    return steps


# -- admission ----------------------------------------------------------------------------------
def test_a_camera_is_accepted_with_what_it_may_expect() -> None:
    made = fleet()
    told = made.admit(demand(), 0.0)
    plan = made.plan("camera")
    assert (told.verdict, plan.owner, plan.rung) == ("accepted", "r0", "full")
    assert made.windows_per_s("camera") == 1.0
    assert made.lag_s("r0") == pytest.approx(0.1, abs=0.01)


def test_what_a_camera_costs_to_admit_does_not_grow_with_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    load_of = CameraOnLadder.load.fget

    def counted(camera: CameraOnLadder) -> float:
        nonlocal read
        read += 1
        return load_of(camera)

    monkeypatch.setattr(CameraOnLadder, "load", property(counted))
    made = fleet()
    for number in range(300):
        made.admit(demand(f"c{number}"), 0.0, force=True)
        assert made.utilisation("r0") > 0
    assert read <= 2 * 300, "loads were summed anew with each camera"


def test_a_full_fleet_takes_cameras_at_reduced_quality_and_then_refuses_with_what_is_missing() -> None:
    made = fleet()
    verdicts = [made.admit(demand(f"c{n}"), 0.0) for n in range(30)]
    # A replica does 0.95 of a second a second; at half the stride a camera takes 0.05.
    assert [told.verdict for told in verdicts].count("accepted") == 9
    assert [told.verdict for told in verdicts[:19]] == ["accepted"] * 9 + ["reduced"] * 10
    assert made.plan("c18").rung == "stride"
    assert made.windows_per_s("c18") == 0.5
    refused = verdicts[19]
    assert refused.verdict == "refused"
    assert refused.missing_streams == pytest.approx(1.0)
    assert refused.missing_replicas == pytest.approx(0.05 / 0.95)
    assert "replicas too few" in refused.reason
    assert len(made.cameras) == 19, "a camera that was refused is not there"
    made.tick(1.0)
    assert made.utilisation("r0") <= 1 + 1e-9, "what was accepted fits"


def test_cameras_whose_windows_are_no_longer_than_their_stride_are_not_taken_for_a_longer_stride() -> None:
    made = fleet()
    verdicts = [made.admit(demand(f"c{n}", window_s=1.0), 0.0).verdict for n in range(12)]
    # A rung that doubles the stride saves nothing of 0.1 s a second each.
    assert verdicts == ["accepted"] * 9 + ["refused"] * 3


def test_a_replica_that_is_drained_makes_no_other_smaller() -> None:
    made = fleet(2)
    made.drain("r1")
    refused = next(told for n in range(40) if (told := made.admit(demand(f"c{n}"), 0.0)).verdict == "refused")
    assert refused.missing_replicas == pytest.approx(0.05 / 0.95)


def test_what_is_missing_is_what_makes_the_same_camera_fit() -> None:
    made = fleet()
    for number in range(19):
        made.admit(demand(f"c{number}"), 0.0)
    big = made.admit(demand("big", stride_s=0.1), 0.0)
    assert big.verdict == "refused"
    for number in range(math.ceil(big.missing_replicas)):
        made.join(f"more-{number}")
    assert made.admit(demand("big", stride_s=0.1), 0.0).verdict != "refused"


def test_a_camera_whose_window_does_not_fit_the_memory_is_refused_with_the_number() -> None:
    made = fleet(0)
    for number in range(2):
        made.join(f"r{number}", window_tokens=800)
    # Five seconds of a frame a second of 256 tokens, of which an eighth (anchors) and a fifth of the rest are kept.
    verdicts = [made.admit(demand(f"c{n}"), 0.0) for n in range(5)]
    assert [told.verdict for told in verdicts] == ["accepted"] * 4 + ["refused"]
    assert "1600 tokens, and this camera's 384 would exceed that by 320" in verdicts[4].reason
    assert verdicts[4].missing_streams == pytest.approx(320 / 384)
    assert made.admit(demand("forced"), 0.0, force=True).verdict == "accepted"
    for gone in ("c0", "forced"):
        made.remove(gone)
    assert made.admit(demand("again"), 0.0).verdict == "accepted"
    # One that is found to keep 96 % between anchors has 1280 * (0.125 + 0.875 * 0.96) = 1235 tokens.
    made.observe_activity("c1", 0.8)
    made.remove("again")
    assert "this camera's 384 would exceed that by 787" in made.admit(demand("again"), 0.0).reason


def test_a_camera_whose_memory_does_not_fit_the_devices_is_refused_with_the_number() -> None:
    made = fleet(0)
    for number in range(2):
        made.join(f"r{number}", waiting_bytes=5 * 2**20)
    # Of 3 MiB each: three fit ten, in whole.
    verdicts = [made.admit(demand(f"c{n}", waiting_bytes=3 * 2**20), 0.0) for n in range(4)]
    assert [told.verdict for told in verdicts] == ["accepted"] * 3 + ["refused"]
    assert "10.0 MiB, and this camera's 3.0 MiB would exceed that by 2.0 MiB" in verdicts[3].reason
    assert verdicts[3].missing_streams == pytest.approx(2 / 3)
    assert made.admit(demand("forgetful"), 0.0).verdict == "accepted", "one without a memory takes none"
    made.remove("c0")
    assert made.admit(demand("late", waiting_bytes=3 * 2**20), 0.0).verdict == "accepted"


def test_bytes_are_refused_where_seconds_are_not_known() -> None:
    made = fleet(1, timed=False)
    assert all(made.admit(demand(f"c{n}"), 0.0).verdict != "refused" for n in range(30))
    made = fleet(0, timed=False)
    assert made.admit(demand("early", waiting_bytes=2**20), 0.0).verdict == "accepted", "nobody is there to be full"
    made.join("r0", waiting_bytes=2**20)
    assert made.admit(demand("late", waiting_bytes=2**20), 0.0).verdict == "refused"


def test_placement_spreads_what_is_scarce() -> None:
    """Cameras of equal seconds, of which every fourth has a large memory: each replica gets its share of these."""
    made = fleet(0)
    for number in range(4):
        made.join(f"r{number}", waiting_bytes=100 * 2**20)
    for number in range(32):
        own = 18 * 2**20 if number % 4 == 0 else 0
        made.admit(demand(f"c{number}", stride_s=10.0, waiting_bytes=own), 0.0)
    owners = [made.plan(f"c{n}").owner for n in range(0, 32, 4)]
    assert sorted(owners) == sorted(2 * made.replicas)


def test_background_is_refused_where_normal_is_let_in_at_its_cost() -> None:
    made = fleet()
    for number in range(19):
        made.admit(demand(f"b{number}", priority=Priority.BACKGROUND), 0.0)
    assert made.admit(demand("b"), 0.0).verdict == "reduced"
    assert made.admit(demand("x", priority=Priority.BACKGROUND), 0.0).verdict == "refused"


def test_without_replicas_cameras_are_refused_or_wait_if_they_must_be_taken() -> None:
    made = fleet(0)
    told = made.admit(demand(), 0.0)
    assert told.verdict == "refused"
    assert "no replica is ready" in told.reason
    told = made.admit(demand(), 0.0, force=True)
    plan = made.plan("camera")
    assert (told.verdict, plan.owner, plan.rung) == ("accepted", None, "full")
    [move] = made.join("r0")
    assert (move.camera, move.source, move.to, move.warm) == ("camera", None, "r0", False)


def test_ten_thousand_cameras_in_a_burst_are_all_told_and_fit() -> None:
    made = fleet(64)
    told = [made.admit(demand(f"c{n}", window_s=40.0, stride_s=8.0), 0.0) for n in range(10_000)]
    verdicts = {verdict: [each.verdict for each in told].count(verdict) for verdict in ("reduced", "refused")}
    # 64 replicas do 608 windows of 0.1 s a second; 10,000 cameras want 1,250, or 625 at twice the stride.
    assert verdicts["refused"] == pytest.approx(10_000 - 608 * 16, abs=20)
    assert verdicts["reduced"] > 4000
    for second in range(20):
        made.tick(float(second))
    assert max(made.utilisation(name) for name in made.replicas) <= 1.0


def test_a_restarted_controller_leaves_cameras_where_they_are() -> None:
    made = fleet(4)
    for number in range(8):
        made.admit(demand(f"c{number}"), 0.0, prefer="r3", force=True)
        assert made.plan(f"c{number}").owner == "r3"


@pytest.mark.parametrize("busy", [1.0, 0.3])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_the_expected_lag_is_near_what_a_simulated_replica_shows(busy, share) -> None:
    """200 ms windows of 60 % scatter, steps of 20 ms their own: the estimate is for admission, half is near enough."""
    draw = random.Random(5)
    model = costs(step_s=0.02, window_s=0.05, computed_s=1e-3, spread=0.1)
    cameras, total = [], 0.0
    while total < share:
        wanted = demand(
            f"c{len(cameras)}",
            stride_s=8.0,
            kept=0.0,
            frame_tokens=round(draw.uniform(10, 60)),
            query_tokens=1,
            anchor_interval_s=1.0,
            window_s=8.0,
            busy=busy,
        )
        total += load(wanted, LADDER.rungs[0], model)
        cameras.append(wanted)
    replica = simulated(cameras, model, FULL, seconds=2000, budget_s=2.0)
    replica.run()
    # Each bin of the histogram counts as its middle.
    middles = LEAST_S * 10 ** ((np.arange(LAG_BINS) - 0.5) / PER_DECADE)
    shown = np.average(middles, weights=replica.tally.lags.sum(axis=(0, 1)))
    found = expected_lag_s(load=total, windows_per_s=len(cameras) * busy / 8, busy=busy, costs=model, max_batch=8)
    assert found == pytest.approx(shown, rel=0.5)


def test_a_replica_that_cannot_keep_up_has_no_lag_to_expect() -> None:
    model = costs()
    assert expected_lag_s(load=1.0, windows_per_s=10, busy=1.0, costs=model, max_batch=8) == math.inf
    assert expected_lag_s(load=0.0, windows_per_s=0, busy=1.0, costs=model, max_batch=8) == 0.0


# -- replicas -----------------------------------------------------------------------------------
def test_what_a_dead_replica_had_goes_to_the_others_cold_and_everything_fits_at_a_lower_rung() -> None:
    made = fleet(4)
    for number in range(34):
        made.admit(demand(f"c{number}"), 0.0)
    assert settled(made, 5) == []
    lost = [name for name in made.cameras if made.plan(name).owner == "r2"]
    moves = made.leave("r2")
    assert sorted(move.camera for move in moves) == lost
    assert all(move.source == "r2" and move.to in ("r0", "r1", "r3") and not move.warm for move in moves)
    steps = made.tick(6.0)
    assert steps
    assert all("capacity" in step.reason for step in steps)
    assert max(made.utilisation(name) for name in made.replicas) <= 0.95
    assert made.plan(steps[0].camera).why == steps[0].reason


def test_a_replica_whose_drain_is_undone_takes_its_share_again() -> None:
    """12 of 0.1 s each are too much for one replica, and 0.6 for each of two."""
    made = fleet(2)
    for number in range(12):
        made.admit(demand(f"c{number}"), 0.0)
    made.drain("r1")
    settled(made, 60)
    assert made.counts_on("r0")[1] > 0
    moves = made.join("r1")
    assert {(move.source, move.to, move.warm) for move in moves} == {("r0", "r1", True)}
    assert [made.counts_on(name)[0] for name in made.replicas] == [6, 6]
    assert made.join("r1") == [], "it was not drained"
    for second in range(60, 120):
        made.tick(float(second))
    assert [made.counts_on(name)[1] for name in made.replicas] == [0, 0], "all are at full quality again"


def test_draining_moves_cameras_warm_and_nothing_comes_back() -> None:
    made = fleet(3)
    for number in range(15):
        made.admit(demand(f"c{number}"), 0.0)
    before = {name: made.plan(name) for name in made.cameras}
    moves = made.drain("r1")
    assert {move.camera for move in moves} == {name for name, plan in before.items() if plan.owner == "r1"}
    assert all(move.warm for move in moves)
    made.admit(demand("new"), 0.0)
    assert all(made.plan(name).owner != "r1" for name in made.cameras)
    assert made.leave("r1") == []
    assert fleet(1).drain("r0") == [], "the only replica keeps its cameras"


def test_a_drained_replica_is_no_capacity_until_it_joins_again() -> None:
    made = fleet(2)
    made.drain("r1")
    verdicts = [made.admit(demand(f"c{n}"), 0.0).verdict for n in range(20)]
    assert verdicts[19] == "refused"
    made.join("r1")
    assert made.admit(demand("c19"), 0.0).verdict != "refused"


def test_a_replica_that_joins_in_the_middle_lets_everyone_climb() -> None:
    made = fleet(1)
    for number in range(16):
        made.admit(demand(f"c{number}"), 0.0)
    made.tick(0.0)
    assert any(made.plan(name).rung != "full" for name in made.cameras)
    moves = made.join("r1")
    assert moves
    assert all(move.warm for move in moves)
    settled(made, 60)
    assert all(made.plan(name).rung == "full" for name in made.cameras)


def test_unknown_replicas_and_cameras() -> None:
    made = fleet()
    assert made.leave("nobody") == []
    assert made.drain("nobody") == []
    made.replica_report("nobody", busy_share=1.0, backlog_s=3.0, now_s=0.0)
    for call in (made.plan, made.remove, lambda name: made.observe_counts(name, Measured(1.0, 1))):
        with pytest.raises(UnknownCameraError, match="'nobody'"):
            call("nobody")


# -- ticks --------------------------------------------------------------------------------------
def test_nothing_changes_while_nothing_changed() -> None:
    made = fleet(8)
    for number in range(60):
        made.admit(demand(f"c{number}"), 0.0)
    made.tick(0.0)
    for second in range(1, 100):
        assert made.tick(float(second)) == []


def test_quiet_cameras_make_room_soon() -> None:
    made = fleet(policy=LadderPolicy(LADDER, hold_s=1.0))
    for number in range(16):
        made.admit(demand(f"c{number}", stride_s=1.0), 0.0)
    made.tick(0.0)
    lowered = [name for name in made.cameras if made.plan(name).rung != "full"]
    assert lowered
    # Half of them go quiet: their windows are gated, and the replica is busy half the time.
    for second in range(1, 40):
        for name in made.cameras[:8]:
            made.observe_counts(name, Measured(1.0, 1, gated=1))
        for name in made.cameras[8:]:
            made.observe_counts(name, Measured(1.0, 1))
        made.replica_report("r0", busy_share=0.5, backlog_s=0.0, now_s=float(second))
        steps = [step for step in made.tick(float(second)) if step.rung_to < step.rung_from]
        if steps:
            break
    assert second <= 20
    assert all("capacity is free again" in step.reason for step in steps)


def test_windows_after_gated_strides_count_with_what_these_left() -> None:
    """Five strides of ten pass the gate, in one stretch or one by one: a window that follows gated ones also encodes
    their anchors."""
    model = costs(window_s=0.01, encoded_s=0.001)
    loads = []
    for resumed in (1, 5):
        made = Fleet(model, LADDER)
        made.join("r0")
        made.admit(demand("gate", anchor_interval_s=1.0, fps=2.0, kept=0.0), 0.0)
        for _ in range(100):
            made.observe_counts("gate", Measured(10.0, 10, gated=5, resumed=resumed))
        loads.append(made.utilisation("r0"))
    # An anchor of 256 tokens per stride. One in five computed windows follows a stretch of five on average, of which at
    # most four strides overlap it.
    stretch = 0.5 * (0.01 + 0.256 * (1 + 0.2 * (1 + 0.8 + 0.64 + 0.512)))
    assert loads == [pytest.approx(stretch, rel=NOTICED), pytest.approx(0.5 * (0.01 + 0.256 * 2), rel=NOTICED)]


def test_a_camera_that_sends_ten_times_its_rate_is_counted_so_and_steps_down() -> None:
    made = fleet()
    for number in range(8):
        made.admit(demand(f"c{number}"), 0.0)
    for second in range(120):
        rung = LADDER.rungs[LADDER.index_of(made.plan("c0").rung)]
        made.observe_counts("c0", Measured(2.0, round(20 / rung.stride)))
        made.tick(float(second))
    assert made._cameras["c0"].estimate.rate == pytest.approx(10, rel=0.2)
    assert made.plan("c0").rung != "full", "it is the dearest"


def test_cameras_that_never_send_take_nobodys_room() -> None:
    made = fleet()
    for number in range(19):
        made.admit(demand(f"c{number}"), 0.0)
    assert made.admit(demand("late"), 0.0).verdict == "refused"
    for _ in range(300):
        for name in made.cameras[:10]:
            made.observe_counts(name, Measured(1.0, 0))
    assert made.admit(demand("late"), 300.0).verdict != "refused"


def test_a_clock_that_is_set_back_stands_still_and_one_that_jumps_ahead_does_no_harm() -> None:
    made = fleet()
    for number in range(16):
        made.admit(demand(f"c{number}"), 1000.0)
    made.tick(1000.0)
    before = {name: made.plan(name) for name in made.cameras}
    made.replica_report("r0", busy_share=0.5, backlog_s=0.0, now_s=5.0)
    assert made.tick(5.0) == []
    assert {name: made.plan(name) for name in made.cameras} == before
    made.replica_report("r0", busy_share=0.9, backlog_s=0.0, now_s=1e9)
    made.tick(1e9)
    assert made.utilisation("r0") < 1.2


def test_what_is_missing_is_told_when_nobody_can_step_further() -> None:
    made = fleet()
    for number in range(40):
        made.admit(demand(f"c{number}", priority=Priority.CRITICAL), 0.0, force=True)
    made.tick(0.0)
    # 40 cameras at half the rate ask for two replicas.
    made.tick(1.0)
    assert made.utilisation("r0") == pytest.approx(2.0)
    assert {made.plan(name).rung for name in made.cameras} == {"stride"}


def test_a_new_demand_counts_at_once() -> None:
    made = fleet()
    made.admit(demand("c"), 0.0)
    made.set_demand("c", demand("c", stride_s=0.5, priority=Priority.CRITICAL))
    assert made.utilisation("r0") == pytest.approx(0.2)
    made.admit(demand("c", stride_s=2.0), 0.0)
    assert made.plan("c").owner == "r0"
    assert made.utilisation("r0") == pytest.approx(0.05)
    assert made.remove("c") == []
    assert made.utilisation("r0") == 0


@pytest.mark.parametrize("raised", [Priority.NORMAL, Priority.CRITICAL])
def test_a_shed_camera_that_becomes_more_urgent_is_answered_at_once_and_others_give_way(raised: Priority) -> None:
    """At 16 windows a second for 10, in whose balance nothing would climb by itself."""
    made = fleet()
    kinds = {f"b{n}": Priority.BACKGROUND for n in range(8)} | {f"n{n}": Priority.NORMAL for n in range(8)}
    for name, priority in kinds.items():
        made.admit(demand(name, priority=priority), 0.0, force=True)
    settled(made, 60.0)
    shed = next(name for name in kinds if made.plan(name).rung == "shed")
    made.set_demand(shed, demand(shed, priority=raised))
    assert made.plan(shed).rung == "full"
    made.replica_report("r0", busy_share=1.0, backlog_s=0.0, now_s=61.0)
    assert {kinds[step.camera] for step in made.tick(61.0)} <= {Priority.BACKGROUND, Priority.NORMAL}
    settled(made, 180.0)
    assert made.plan(shed).rung != "shed"
    lower = made.plan(shed).rung
    made.set_demand(shed, demand(shed, priority=Priority.BACKGROUND))
    assert made.plan(shed).rung == lower, "a less urgent one gives way when it is its turn"


# -- a replica on simulated time ----------------------------------------------------------------
def simulated(cameras: list[Demand], model: CostModel, ladder: Ladder, **changes) -> District:
    """One replica with these cameras. ``changes``: ``seconds``, ``budget_s``, ``spells``."""
    mix = Mix(classes=[CameraClass.of(each, 1) for each in cameras])
    count, seconds = len(cameras), changes["seconds"]
    plan = CityPlan(
        cameras=count,
        pools=(PoolPlan("made", 1, model),),
        mix=mix,
        mix_name="made",
        ladder=ladder,
        ladder_name="made",
        timing=Timing(seconds, bin_s=12.0),
        engine=EngineSettings(budget_s=changes["budget_s"]),
        force=True,
    )
    phases = [number * 0.618034 % 1 for number in range(count)]
    spells = changes.get("spells", ())
    return District(plan, np.arange(count), replicas=1, costs=model, seed=(2,), phases=phases, spells=spells)


def overloaded(over: float, busy: float, **changes) -> District:
    model = costs(step_s=0.01, window_s=0.05, spread=0.1)
    draw = random.Random(2)
    cameras, total = [], 0.0
    while total < over:
        priority = draw.choices(list(Priority), [0.1, 0.6, 0.3])[0]
        wanted = demand(f"c{len(cameras)}", priority=priority, stride_s=8.0, window_s=40.0, busy=busy)
        total += load(wanted, LADDER.rungs[0], model)
        cameras.append(wanted)
    return simulated(cameras, model, LADDER, budget_s=0.5, **changes)


def unaccounted(district: District) -> int:
    tally = district.tally
    return tally.due.sum() - tally.answered.sum() - tally.gated.sum() - tally.dropped.sum() - district.waiting


def test_everyone_waking_at_once_goes_down_the_ladder_and_up_again_without_a_critical_window_late() -> None:
    """After three minutes, when they have come to rest, they are all busy for 84 s, seven stretches of the tally."""
    district = overloaded(
        0.7, 0.3, seconds=384, spells=[BurstPeriod("wake", 180.0, 264.0, 1.0, frozenset(range(1000)))]
    )
    district.run()
    tally, rank, awake = district.tally, Priority.CRITICAL.rank, slice(15, 22)
    assert set(by_reason(tally.dropped)) == {"shed"}, "the queue gives nothing up"
    assert tally.answered[awake, rank].sum() > 100
    assert (tally.answered == tally.on_time)[:, rank].all()
    assert tally.dropped[:, rank].sum() == 0
    assert lag_quantile(tally.lags[awake, rank].sum(axis=0), 1.0) < 2.0
    assert tally.rung_s[awake, 1:].all(axis=0).any()
    assert all(district.fleet.plan(name).rung == "full" for name in district.names), "and back"
    assert unaccounted(district) == 0


def test_a_camera_at_ten_times_its_rate_harms_no_other() -> None:
    district = overloaded(0.8, 1.0, seconds=360)
    due = district.cameras.due
    fast = next(i for i, each in enumerate(district.plan.mix.classes) if each.priority is Priority.NORMAL)
    district.cameras.stride_s[fast] /= 10

    def due_as_declared(until_s, wakes):
        found = due(until_s, wakes)
        return found._replace(stride_s=np.where(found.camera == fast, 10 * found.stride_s, found.stride_s))

    district.cameras.due = due_as_declared
    district.run()
    tally = district.tally
    assert lag_quantile(tally.lags.sum(axis=(0, 1)), 0.99) < 8.0
    assert (tally.answered == tally.on_time)[:, Priority.CRITICAL.rank].all()
    assert district.fleet._cameras[district.names[fast]].estimate.rate > 3
    assert unaccounted(district) == 0
