"""A controller that knows what a window costs: admission, the ladder in the assignments, and what reaches the fleet."""

import pytest
from scheduling_parts import LADDER, costs

from cluster.config import CameraConfig, CameraEntry, QuestionConfig, SightlineConfig, camera_settings
from cluster.control.directory import Directory
from cluster.control.fleet_settings import FleetSettings
from cluster.errors import CapacityError, ConfigError, NotFoundError, NotReadyError
from cluster.types import PatchGeometry
from cluster.types.reports import CameraReport, DecoderInfo, ReplicaInfo, ReplicaReport, StreamReport

QUESTION = QuestionConfig(id="fence", text="Is anyone climbing the fence?")
GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
SETTINGS = FleetSettings(costs(), LADDER)
FITTING = 19
"""Cameras of a window a second each, 0.1 s a window: half of them at the lowest rung that answers, below 95 %."""


def camera(name: str, priority: str = "normal", **settings) -> CameraConfig:
    window = {"length_s": 8, "stride_s": 1} | settings.pop("window", {})
    entry = CameraEntry(name=name, questions=[QUESTION], priority=priority, window=window, **settings)
    return camera_settings(SightlineConfig(), entry)


def directory(replicas: int = 1, settings: FleetSettings = SETTINGS) -> Directory:
    made = Directory(heartbeat_timeout_s=10, quality=settings)
    made.join_decoder(DecoderInfo("decoder-0", "d", "d:1", "", 1), 0.0)
    for number in range(replicas):
        made.join_replica(ReplicaInfo(f"r{number}", f"r{number}:1", "", 1, GEOMETRY), 0.0)
    return made


def rungs(made: Directory) -> dict[str, str]:
    return {each.settings.name: each.rung.name for each in made.assignment("decoder-0").cameras}


def report(made: Directory, at_s: float, *, busy_s: float, backlog_s: float = 0.0, streams=(), instance="r0") -> None:
    assert made.heartbeat_replica(instance, streams, at_s, ReplicaReport(busy_s, backlog_s))


def admit(made: Directory, name: str, now_s: float) -> None:
    made.check_add(camera(name), now_s, force=False)
    made.add(camera(name), now_s)


def send(made: Directory, *names: str) -> None:
    """Pictures come from these cameras, or from all."""
    reports = [CameraReport(name, "running", counts={"frames_decoded": 1}) for name in names or made.cameras]
    assert made.heartbeat_decoder("decoder-0", "d", reports, 0.0)


def run(made: Directory, first_s: int, last_s: int, *, cost: float, busy_s: float = 0.0) -> float:
    """One replica whose windows take ``cost`` times what the model says; returns its busy seconds."""
    backlog_s = 0.0
    for second in range(first_s, last_s):
        offered = sum(0.1 * cost * made.status(name).windows_per_s for name in made.cameras) + backlog_s
        busy_s += min(1.0, offered)
        backlog_s = max(0.0, offered - 1.0)
        report(made, second, busy_s=busy_s, backlog_s=backlog_s)
        made.tick(float(second))
    return busy_s


def test_cameras_are_taken_until_none_fits_even_at_the_lowest_quality() -> None:
    made = directory()
    for number in range(FITTING):
        admit(made, f"cam-{number}", 0.0)
    assert {name for name, rung in rungs(made).items() if rung == "full"} == {f"cam-{number}" for number in range(9)}
    before = (made.version, made.cameras)
    sentence = "camera .late. is refused: the fleet is full .* cameras like this one too many, or .* replicas too few"
    with pytest.raises(CapacityError, match=sentence):
        admit(made, "late", 1.0)
    assert (made.version, made.cameras) == before
    assert "late" not in rungs(made)


def test_as_many_cameras_are_taken_as_the_replica_can_answer_though_the_cost_model_is_wrong() -> None:
    """Windows take twice the predicted 0.1 s: of cameras with a window every 2 s at the lowest rung, 9 can be
    answered, 19 by prediction."""
    made = directory()
    for number in range(7):
        admit(made, f"cam-{number}", 0.0)
    send(made)
    busy_s = run(made, 0, 60, cost=2.0)
    assert "stride" in rungs(made).values()
    admit(made, "cam-7", 60.0)
    admit(made, "cam-8", 60.0)
    with pytest.raises(CapacityError, match="the fleet is full"):
        admit(made, "cam-9", 60.0)
    send(made)
    run(made, 60, 180, cost=2.0, busy_s=busy_s)
    assert set(rungs(made).values()) <= {"prune", "stride"}, "none is shed"


def test_a_camera_that_must_be_taken_is_taken() -> None:
    made = directory()
    for number in range(FITTING):
        made.add(camera(f"cam-{number}"), 0.0)
    made.add(camera("late"), 1.0)
    assert made.status("late").replica == "replica-0"
    assert "late" in rungs(made)


def test_a_refused_camera_comes_in_when_another_goes_or_a_replica_comes() -> None:
    made = directory()
    for number in range(FITTING):
        made.add(camera(f"cam-{number}"), 0.0)
    with pytest.raises(CapacityError):
        admit(made, "late", 1.0)
    made.remove("cam-3")
    admit(made, "late", 2.0)
    with pytest.raises(CapacityError):
        admit(made, "later", 3.0)
    made.join_replica(ReplicaInfo("r1", "r1:1", "", 1, GEOMETRY), 4.0)
    admit(made, "later", 4.0)


def test_without_costs_or_admission_nobody_is_refused_and_nobody_gives_way() -> None:
    for settings in (FleetSettings(None, LADDER), FleetSettings(costs(), LADDER, admission=False)):
        made = directory(settings=settings)
        for number in range(3 * FITTING):
            admit(made, f"cam-{number}", 0.0)
        assert len(made.cameras) == 3 * FITTING
    unknown = directory(settings=FleetSettings(None, LADDER))
    for number in range(FITTING):
        admit(unknown, f"cam-{number}", 0.0)
    for second in range(1, 30):
        report(unknown, second, busy_s=0.5 * second)
        assert unknown.tick(float(second)) == []
    assert unknown.status("cam-0").expected_lag_s == 0


def test_a_camera_that_is_added_again_keeps_what_was_measured_of_it() -> None:
    made = directory()
    made.add(camera("gate"), 0.0)
    for second in range(1, 120):
        done = StreamReport("gate", counts={"windows_done": second // 2, "windows_gated": (second + 1) // 2})
        report(made, second, busy_s=0.05 * second, streams=[done])
    measured = made.status("gate")
    version = made.version
    made.update(camera("gate"), 120.0)
    assert made.status("gate").replica == "replica-0"
    assert made.version == version
    assert made.status("gate") == measured


def test_another_threshold_leaves_what_was_measured_and_lowers_nobody() -> None:
    """Of quiet cameras as if all their windows were computed again, it would be several times the load."""
    made = directory()
    names = [f"cam-{number}" for number in range(16)]
    for name in names:
        made.add(camera(name), 0.0)
    send(made)
    for second in range(1, 400):
        counts = {"windows_done": second // 5, "windows_gated": second - second // 5}
        report(made, second, busy_s=0.32 * second, streams=[StreamReport(name, counts=counts) for name in names])
        steps = made.tick(float(second))
        assert second < 300 or steps == []
        if second == 300:
            question = QUESTION.model_copy(update={"threshold": 0.7})
            for name in names:
                made.update(camera(name).model_copy(update={"questions": [question]}), 300.0)
    assert made.replica_statuses()[0].utilisation == pytest.approx(0.32, abs=0.05)


def test_steps_of_the_ladder_are_in_the_assignments_with_their_reason_and_are_taken_back(monkeypatch) -> None:
    made, steps = directory(), []
    tick = made.tick
    monkeypatch.setattr(made, "tick", lambda now_s: steps.extend(tick(now_s)))
    for number in range(8):
        made.add(camera(f"cam-{number}"), 0.0)
    made.add(camera("vault", "critical"), 0.0)
    send(made)
    assert set(rungs(made).values()) == {"full"}
    version, declared = made.version, made.declared
    busy_s = run(made, 1, 40, cost=1.5)
    assert made.version > version
    assert made.declared == declared, "alerting is not sent every camera's settings again"
    now = rungs(made)
    lowered = [name for name, rung in now.items() if rung != "full"]
    assert lowered
    assert now["vault"] == "full"
    assert {step.camera for step in steps} >= set(lowered)
    assert len(steps) <= len(lowered) + 4, "it swings"
    assert made.rungs() == {name: list(now.values()).count(name) for name in ("full", "prune", "stride", "shed")}
    status = made.status(lowered[0])
    assert status.rung == now[lowered[0]]
    assert "of its capacity" in status.rung_reason
    assert status.windows_per_s < made.status("vault").windows_per_s == 1.0
    assert (made.status("vault").priority, made.status("vault").rung_reason) == ("critical", "")
    version = made.version
    run(made, 40, 240, cost=0.5, busy_s=busy_s)
    assert set(rungs(made).values()) == {"full"}
    assert made.version > version
    assert made.status(lowered[0]).rung_reason == ""


def test_background_cameras_are_shed_before_others_and_say_so() -> None:
    made = directory()
    for number in range(6):
        made.add(camera(f"cam-{number}"), 0.0)
        made.add(camera(f"spare-{number}", "background"), 0.0)
    send(made)
    run(made, 1, 100, cost=1.8)
    now = rungs(made)
    shed = [name for name, rung in now.items() if rung == "shed"]
    assert shed
    assert all(name.startswith("spare") for name in shed)
    assert made.status(shed[0]).windows_per_s == 0


def test_what_the_replica_counts_changes_what_a_camera_is_taken_for() -> None:
    """Nine of ten windows pass the static gate: ten times as many cameras fit."""
    made = directory()
    names = [f"cam-{number}" for number in range(FITTING)]
    for name in names:
        made.add(camera(name), 0.0)
    for second in range(1, 200):
        counts = {"windows_gated": second - second // 10, "windows_done": second // 10}
        report(made, second, busy_s=0.19 * second, streams=[StreamReport(name, counts=counts) for name in names])
        made.tick(float(second))
    admit(made, "late", 200.0)
    assert set(rungs(made).values()) == {"full"}


def test_what_a_camera_keeps_is_measured_on_the_windows_that_are_computed() -> None:
    """Three of four windows are gated, and keep little more than their anchors: they tell nothing of the fourth."""
    always, seldom = directory(), directory()
    for made in (always, seldom):
        made.add(camera("gate"), 0.0)
    for second in range(1, 400):
        done = second // 4
        gated = second - done
        computed = {"tokens_full": 1000 * done, "tokens_kept": 400 * done}
        counts = {"windows_done": done, **computed}
        report(always, second, busy_s=0.1 * second, streams=[StreamReport("gate", counts=counts, computed=computed)])
        counts = {
            "windows_done": done,
            "windows_gated": gated,
            "tokens_full": 1000 * second,
            "tokens_kept": 400 * done + 130 * gated,
        }
        report(seldom, second, busy_s=0.1 * second, streams=[StreamReport("gate", counts=counts, computed=computed)])
    wanted, found = (made._fleet._cameras["gate"].estimate.kept for made in (always, seldom))
    assert found == pytest.approx(wanted, abs=0.01)


def test_counts_that_straddle_a_step_a_restart_or_a_move_say_nothing() -> None:
    made = directory(replicas=2)
    made.add(camera("gate"), 0.0)
    owner = made.status("gate").replica
    mine, other = ("r0", "r1") if owner == "replica-0" else ("r1", "r0")
    report(made, 1.0, busy_s=0.1, streams=[StreamReport("gate", counts={"windows_done": 1000})], instance=mine)
    rate = made.status("gate").windows_per_s
    report(made, 2.0, busy_s=0.2, streams=[StreamReport("gate", counts={"windows_done": 5})], instance=mine)
    report(made, 2.0, busy_s=0.2, streams=[StreamReport("gate", counts={"windows_done": 900})], instance=other)
    assert made.status("gate").windows_per_s == rate
    report(made, 12.0, busy_s=0.3, streams=[StreamReport("gate", counts={"windows_done": 35})], instance=mine)
    assert made.status("gate").windows_per_s > rate


def test_cameras_that_never_connected_hold_nobody_down_and_keep_the_room_they_were_promised() -> None:
    """0.1 s a second each, on one replica: four that send are 40 %, and 250 more would be 2,540 %."""
    made = directory()
    live = [f"cam-{number}" for number in range(4)]
    for name in live:
        made.add(camera(name), 0.0)
    send(made, *live)
    for number in range(250):
        made.add(camera(f"idle-{number}"), 0.0)
    for second in range(1, 60):
        report(made, float(second), busy_s=0.4 * second)
        assert {step.camera for step in made.tick(float(second))}.isdisjoint(live)
    [status] = made.replica_statuses()
    assert status.utilisation == pytest.approx(0.4)
    assert {rungs(made)[name] for name in live} == {"full"}
    # Half of 254 x 0.1 s would not fit: nobody is promised anything on top.
    with pytest.raises(CapacityError):
        admit(made, "late", 60.0)
    # Seven of them connect: 11 x 0.1 s are more than one replica does.
    send(made, *(f"idle-{number}" for number in range(7)))
    made.tick(60.0)
    [status] = made.replica_statuses()
    assert 0.9 < status.utilisation <= 0.97
    lowered = [name for name, rung in rungs(made).items() if rung != "full"]
    assert lowered
    assert set(lowered) <= {*live, *(f"idle-{number}" for number in range(250))}


def test_a_camera_of_other_settings_is_still_one_that_never_connected() -> None:
    made = directory()
    made.add(camera("gate"), 0.0)
    made.update(camera("gate", window={"stride_s": 2}), 1.0)
    assert made.replica_statuses()[0].utilisation == 0.0
    send(made)
    assert made.replica_statuses()[0].utilisation == pytest.approx(0.05)
    made.update(camera("gate"), 2.0)
    assert made.replica_statuses()[0].utilisation == pytest.approx(0.1)
    made.remove("gate")
    assert made.replica_statuses()[0].utilisation == 0.0


def test_the_size_of_the_picture_is_what_the_demand_is_made_of_once_it_is_seen() -> None:
    by_token = FleetSettings(costs(window_s=0.0, computed_s=1e-4), LADDER)
    lags = {}
    for size in ((320, 240), (1920, 1080)):
        made = directory(settings=by_token)
        made.add(camera("gate"), 0.0)
        send(made)
        made.heartbeat_decoder("decoder-0", "d", [CameraReport("gate", "running", width=size[0], height=size[1])], 1.0)
        lags[size] = made.status("gate").expected_lag_s
    assert lags[(320, 240)] < lags[(1920, 1080)]


def test_pictures_and_model_count_as_they_are_whatever_was_heard_of_first() -> None:
    by_token = FleetSettings(costs(window_s=0.0, computed_s=1e-4), LADDER)
    flat, tall = (CameraReport("gate", "running", width=280, height=height) for height in (140, 280))
    lags = []
    for before, after in (((), (tall,)), ((), (flat, tall)), ((tall,), (tall,))):
        made = Directory(heartbeat_timeout_s=10, quality=by_token)
        made.join_decoder(DecoderInfo("decoder-0", "d", "d:1", "", 1), 0.0)
        made.add(camera("gate"), 0.0)
        for each in before:
            made.heartbeat_decoder("decoder-0", "d", [each], 1.0)
        made.join_replica(ReplicaInfo("r0", "r0:1", "", 1, GEOMETRY), 2.0)
        for each in after:
            made.heartbeat_decoder("decoder-0", "d", [each], 3.0)
        send(made)
        lags.append(made.status("gate").expected_lag_s)
    assert lags[0] > 0
    assert lags[1:] == pytest.approx([lags[0]] * 2)


def test_a_restarted_controller_learns_who_has_what_and_moves_nobody() -> None:
    made = directory(replicas=3)
    for number in range(20):
        made.add(camera(f"cam-{number}"), 0.0)
    owners = {name: made.status(name).replica for name in made.cameras}
    assert len(set(owners.values())) == 3
    again = Directory(heartbeat_timeout_s=10, quality=SETTINGS)
    again.join_decoder(DecoderInfo("decoder-0", "d", "d:1", "", 1), 0.0, running=made.cameras)
    for name in ("replica-2", "replica-0", "replica-1"):
        held = [camera for camera, owner in owners.items() if owner == name]
        assert again.join_replica(made.replicas[name], 0.0, known_as=name, streams=held) == name
    for name in made.cameras:
        again.add(camera(name), 0.0)
    assert {name: again.status(name).replica for name in again.cameras} == owners


def five_cameras() -> Directory:
    """At work on one replica."""
    made = directory()
    for number in range(5):
        made.add(camera(f"cam-{number}"), 0.0)
    send(made)
    return made


def test_questions_that_take_what_windows_leave_cost_no_camera_its_quality() -> None:
    made = five_cameras()
    for second in range(60):
        load = ReplicaReport(1.0 * second, 0.0, asked_s=0.5 * second)
        assert made.heartbeat_replica("r0", (), float(second), load)
        assert made.tick(float(second)) == []
    assert made.replica_statuses()[0].utilisation == pytest.approx(0.5)


def test_a_controller_that_stood_still_takes_nobody_for_busier_than_it_is() -> None:
    made = five_cameras()
    for second in range(20):
        report(made, float(second), busy_s=0.5 * second)
        made.expire(float(second))
    made.expire(50.0)
    report(made, 50.5, busy_s=0.5 * 50.5)
    assert made.replica_statuses()[0].utilisation == pytest.approx(0.5)


def test_cameras_of_a_lost_replica_run_elsewhere_at_what_quality_there_is() -> None:
    made = directory(replicas=2)
    for number in range(16):
        made.add(camera(f"cam-{number}"), 0.0)
    send(made)
    assert set(rungs(made).values()) == {"full"}
    version = made.version
    made.leave_replica("replica-1")
    assert made.version > version
    assert {made.status(name).replica for name in made.cameras} == {"replica-0"}
    assert {each.replica_address for each in made.assignment("decoder-0").cameras} == {"r0:1"}
    steps = [step for second in range(1, 20) for step in made.tick(float(second))]
    assert steps, "16 cameras of 0.1 s a second are too much for one replica, before it says so itself"
    assert sum(rung == "stride" for rung in rungs(made).values()) >= 13


def test_a_drained_replica_gives_its_cameras_away_and_gets_none_until_it_may_again() -> None:
    made = directory(replicas=3)
    for number in range(9):
        made.add(camera(f"cam-{number}"), 0.0)
    send(made)
    made.heartbeat_replica("r1", [], 1.0, ReplicaReport(0.1, 0.7, held=3, trouble="no core"))
    before = {status.name: status for status in made.replica_statuses()}
    assert sum(status.cameras for status in before.values()) == 9
    assert (before["replica-1"].held, before["replica-1"].backlog_s, before["replica-1"].draining) == (3, 0.7, False)
    assert [before[name].trouble for name in sorted(before)] == ["", "no core", ""]
    assert before["replica-1"].utilisation == pytest.approx(0.1 * before["replica-1"].cameras)
    version = made.version
    status = made.drain("replica-1")
    assert (status.draining, status.cameras, status.held) == (True, 0, 3), "it holds them until they have moved"
    assert made.version > version
    made.add(camera("new"), 2.0)
    assert {made.status(name).replica for name in made.cameras} == {"replica-0", "replica-2"}
    assert not made.drain("replica-1", undo=True).draining
    for number in range(9, 14):
        made.add(camera(f"cam-{number}"), 3.0)
    assert made.replica_statuses()[1].cameras > 0


def test_a_drained_replica_that_was_started_anew_takes_cameras() -> None:
    made = directory(replicas=2)
    for number in range(8):
        made.add(camera(f"cam-{number}"), 0.0)
    made.drain("replica-0")
    made.leave_replica("replica-0")
    assert made.join_replica(ReplicaInfo("again", "again:1", "", 1, GEOMETRY), 5.0) == "replica-0"
    status = made.replica_statuses()[0]
    assert (status.address, status.draining) == ("again:1", False)
    assert status.cameras >= 3


def test_the_last_replica_is_not_drained_and_an_unknown_one_is_named() -> None:
    made = directory()
    made.add(camera("gate"), 0.0)
    with pytest.raises(NotReadyError, match="no other replica takes cameras; replica-0 keeps its own"):
        made.drain("replica-0")
    assert made.status("gate").replica == "replica-0"
    assert not made.replica_statuses()[0].draining
    with pytest.raises(NotFoundError, match="there is no replica 'replica-9'; there are: replica-0"):
        made.drain("replica-9")


def test_a_priority_that_does_not_exist_is_refused_by_name() -> None:
    from cluster.config import parse_camera

    with pytest.raises(ConfigError, match="priority"):
        parse_camera("gate", "", [], {"priority": "urgent"})
