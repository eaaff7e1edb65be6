"""The quality ladder: its file, its order against brute force, classes, and hysteresis."""

import itertools
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_parts import LADDER

from cluster.control.ladder import CameraOnLadder, Ladder, LadderPolicy, Rung, default
from cluster.errors import ConfigError
from cluster.types.cameras import Priority

POLICY = LadderPolicy(LADDER, high=0.95, aim=0.9, low=0.8, hold_s=8.0, climb=1.0)
LOOSE = replace(POLICY, weights=dict.fromkeys(Priority, 1.0), climb=0.05)
SHED = len(LADDER.rungs) - 1


def camera(priority: Priority, *loads: float, rung: int = 0, since_s: float = 0.0) -> CameraOnLadder:
    return CameraOnLadder(priority, loads or (0.1, 0.08, 0.04, 0.0), rung, since_s)


def apply(cameras, steps) -> float:
    for step in steps:
        assert cameras[step.camera].rung == step.rung_from
        cameras[step.camera].rung, cameras[step.camera].since_s = step.rung_to, step.at_s
    return sum(each.load for each in cameras.values())


def test_nothing_happens_within_the_band() -> None:
    cameras = {"a": camera(Priority.NORMAL), "b": camera(Priority.NORMAL, rung=1)}
    for utilisation in (0.80, 0.87, 0.95):
        assert POLICY.decide(cameras, utilisation, 100.0) == []


def test_the_cheapest_loss_per_saving_goes_first() -> None:
    cameras = {
        "dear": camera(Priority.NORMAL, 0.10, 0.09, 0.08, 0.0),
        "cheap": camera(Priority.NORMAL, 0.30, 0.15, 0.10, 0.0),
    }
    [step] = POLICY.decide(cameras, 0.96, 5.0)
    assert (step.camera, step.rung_from, step.rung_to, step.at_s) == ("cheap", 0, 1, 5.0)
    assert "96%" in step.reason


def test_background_gives_way_before_normal() -> None:
    cameras = {"n": camera(Priority.NORMAL), "b": camera(Priority.BACKGROUND)}
    assert next(step.camera for step in POLICY.decide(cameras, 0.91 + 0.05, 0.0)) == "b"


CLASSES = st.lists(st.sampled_from(list(Priority)), min_size=1, max_size=12)


@given(CLASSES, st.floats(0.96, 4.0), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_classes_give_way_in_order_and_no_further_than_needed(classes, utilisation, random) -> None:
    cameras = {}
    for number, priority in enumerate(classes):
        full = random.uniform(0.02, 0.5)
        cameras[f"c{number}"] = camera(priority, full, full * 0.8, full * 0.3, 0.0)
    before = sum(each.load for each in cameras.values())
    steps = POLICY.decide(cameras, utilisation, 0.0)
    left = utilisation - (before - apply(cameras, steps))
    assert len({step.camera for step in steps}) == len(steps)
    rungs = {priority: [c.rung for c in cameras.values() if c.priority is priority] for priority in Priority}
    assert all(rung < SHED for rung in rungs[Priority.CRITICAL]), "a critical camera was shed"
    if any(rungs[Priority.CRITICAL]):
        assert all(rung >= SHED - 1 for rung in rungs[Priority.NORMAL]), "critical stepped before normal"
        assert all(rung == SHED for rung in rungs[Priority.BACKGROUND]), "critical stepped before background"
    if SHED in rungs[Priority.NORMAL]:
        assert all(rung == SHED - 1 for rung in rungs[Priority.CRITICAL]), "normal was shed too early"
    if left > POLICY.aim + 1e-9:
        assert all(rung >= SHED - 1 for each in rungs.values() for rung in each), "somebody could still step"


@given(st.lists(st.tuples(st.floats(0.05, 0.3), st.floats(0.5, 0.95)), min_size=2, max_size=5), st.floats(0.05, 0.5))
@settings(deadline=None, max_examples=60)
def test_the_loss_is_the_least_there_is_but_for_the_last_camera(shapes, excess) -> None:
    """Against trying everything, of cameras of one class: greedy along the hull loses at most one step more."""
    policy = LadderPolicy(LADDER, hold_s=0.0)
    cameras = {}
    for number, (full, share) in enumerate(shapes):
        cameras[f"c{number}"] = camera(Priority.NORMAL, full, full * share, full * share * 0.4, 0.0)
    utilisation = policy.high + excess
    loads = [each.loads for each in cameras.values()]
    worth = [rung.value for rung in LADDER.rungs[:SHED]]
    needed = utilisation - policy.aim
    fitting = [
        sum(1 - worth[rung] for rung in chosen)
        for chosen in itertools.product(range(SHED), repeat=len(loads))
        if sum(each[0] - each[rung] for each, rung in zip(loads, chosen, strict=True)) >= needed - 1e-9
    ]
    apply(cameras, policy.decide(cameras, utilisation, 0.0))
    if fitting:
        lost = sum(1 - LADDER.rungs[each.rung].value for each in cameras.values())
        assert lost <= min(fitting) + (1 - worth[-1]) + 1e-9


def test_climbing_waits_until_a_camera_has_stood_a_while_and_stops_at_the_aim() -> None:
    cameras = {f"c{n}": camera(Priority.NORMAL, rung=2, since_s=10.0) for n in range(4)}
    assert POLICY.decide(cameras, 0.5, 17.0) == []
    steps = POLICY.decide(cameras, 0.75, 18.0)
    after = 0.75 + apply(cameras, steps) - 4 * 0.04
    assert steps
    assert 0.75 < after <= 0.9
    assert POLICY.decide(cameras, after, 19.0) == [], "it swings"


def test_cameras_climb_a_few_at_a_time_and_one_in_any_case() -> None:
    policy = replace(POLICY, climb=0.05)
    cameras = {f"c{n}": camera(Priority.NORMAL, 0.022, 0.02, 0.01, 0.0, rung=2) for n in range(20)}
    steps = policy.decide(cameras, 0.2, 100.0)
    assert 0.03 < apply(cameras, steps) - 20 * 0.01 <= 0.05
    alone = {"large": camera(Priority.NORMAL, 0.3, 0.25, 0.1, 0.0, rung=2)}
    assert [step.rung_to for step in policy.decide(alone, 0.2, 100.0)] == [1]


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_what_was_noted_of_cameras_before_changes_no_decision(seed) -> None:
    """Cameras come to other loads, classes and rungs between decisions; fresh ones like them decide the same."""
    draw = random.Random(seed)
    cameras = {f"c{n}": camera(draw.choice(list(Priority))) for n in range(8)}
    for second in range(12):
        for each in draw.sample(list(cameras.values()), 3):
            full = draw.uniform(0.02, 0.5)
            match draw.randrange(4):
                case 0:
                    each.loads = (full, full * draw.uniform(0.5, 1.0), full * draw.uniform(0.1, 0.5), 0.0)
                case 1:
                    each.priority = draw.choice(list(Priority))
                case 2:
                    each.rung = draw.randrange(SHED + (each.priority is not Priority.CRITICAL))
        fresh = {name: CameraOnLadder(each.priority, each.loads, each.rung) for name, each in cameras.items()}
        for name, each in cameras.items():
            each.since_s = fresh[name].since_s = draw.choice([0.0, float(second)])
        utilisation, now_s, policy = draw.uniform(0.3, 1.6), second + 8.0, draw.choice([POLICY, LOOSE])
        steps = policy.decide(cameras, utilisation, now_s)
        assert steps == policy.decide(fresh, utilisation, now_s)
        apply(cameras, steps)


def test_a_shed_normal_camera_comes_back_before_anybody_gets_better() -> None:
    cameras = {
        "shed": camera(Priority.NORMAL, 0.1, 0.08, 0.06, 0.0, rung=3),
        "critical": camera(Priority.CRITICAL, rung=1),
        "background": camera(Priority.BACKGROUND, rung=1),
    }
    assert next(step.camera for step in POLICY.decide(cameras, 0.79, 100.0)) == "shed"
    cameras["shed"].loads = (0.6, 0.5, 0.4, 0.0)
    assert POLICY.decide(cameras, 0.79, 100.0) == [], "a lesser one took the room it waits for"


def test_a_rung_that_saves_a_camera_nothing_is_passed_over() -> None:
    cameras = {"a": camera(Priority.NORMAL, 0.2, 0.2, 0.1, 0.0)}
    assert [step.rung_to for step in POLICY.decide(cameras, 0.96, 0.0)] == [2]


def test_a_longer_stride_is_worth_less_though_its_f1_is_not() -> None:
    assert Rung("r", stride=2.0, f1=0.9).value == pytest.approx(0.45)
    ladder = Ladder((Rung("full"), Rung("prune", f1=0.95), Rung("stride", f1=0.95, stride=2.0)), "test")
    cameras = {"a": CameraOnLadder(Priority.NORMAL, (0.5, 0.4, 0.2))}
    assert [step.rung_to for step in LadderPolicy(ladder).decide(cameras, 0.98, 0.0)] == [1]


def test_a_ladder_comes_back_from_its_file_and_from_a_models_folder(tmp_path) -> None:
    default().save(tmp_path)
    assert Ladder.load(tmp_path) == Ladder.load(tmp_path / "ladder.json") == default()
    assert "unmeasured" in default().source
    assert default().floor == len(default().rungs) - 2
    assert default().index_of("stride") == 3
    with pytest.raises(ConfigError, match="no rung 'half'"):
        default().index_of("half")


@pytest.mark.parametrize(
    ("rungs", "words"),
    [
        ([], "full quality"),
        ([{"name": "full", "stride": 2.0}], "full quality"),
        ([{"name": "full"}, {"name": "full"}], "distinct names"),
        ([{"name": "full"}, {"name": "a", "f1": 0.5}, {"name": "b", "f1": 0.6}], "must not have a higher f1"),
        ([{"name": "full"}, {"name": "a", "shed": True}, {"name": "b"}], "last rung"),
        ([{"name": "full"}, {"name": "a", "f1": 1.5}], "fraction of full"),
        ([{"name": "full"}, {"name": "a", "fps": 0}], "above 0"),
        ([{"name": "full"}, {"name": "a", "refresh_budget": 7}], "0 to 1"),
        ([{"name": "full", "speed": 3}], "speed"),
        ("none", "not a ladder"),
    ],
)
def test_files_that_are_no_ladder_are_refused(tmp_path, rungs, words) -> None:
    file = tmp_path / "ladder.json"
    file.write_text(json.dumps({"rungs": rungs, "source": "test"}))
    with pytest.raises(ConfigError, match=words):
        Ladder.load(file)


def test_missing_and_broken_files_say_how_to_make_one(tmp_path) -> None:
    with pytest.raises(ConfigError, match="sightline eval ladder"):
        Ladder.load(tmp_path)
    (tmp_path / "ladder.json").write_text("{")
    with pytest.raises(ConfigError, match=r"not a ladder \(JSONDecodeError.*sightline eval ladder"):
        Ladder.load(tmp_path)


def test_a_ladder_may_end_without_shedding() -> None:
    short = Ladder((Rung("full"), Rung("a", f1=0.9)), "test")
    assert short.floor == 1
    cameras = {"b": CameraOnLadder(Priority.BACKGROUND, (0.5, 0.4))}
    assert [s.rung_to for s in LadderPolicy(short).decide(cameras, 3.0, 0.0)] == [1]
