"""Who gives way when a decoder has no time for all its cameras, in a made process that decodes what it can."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.decoder.decode_load import HOLD_S, SETTLE_S, DecodeBacklog, DecodePressure
from cluster.types.cameras import Priority

STRIDE_S = 8.0


def wait(camera: str, behind_s: float, priority: Priority = Priority.NORMAL) -> DecodeBacklog:
    return DecodeBacklog(camera, priority, behind_s, STRIDE_S)


class Process:
    """Decodes ``capacity`` seconds of video a second, shared evenly; each camera's backlog in seconds of its video."""

    def __init__(self, cameras: dict[str, Priority], capacity: float) -> None:
        self.capacity = capacity
        self.cameras = cameras
        self.backlog = dict.fromkeys(cameras, 0.0)
        self.pressure = DecodePressure()
        self.now_s = 0.0
        self.steps: list[tuple[float, bool, tuple[str, ...]]] = []

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            down = self.pressure.down
            for name in down:
                self.backlog[name] = 0.0
            left, busy = self.capacity, {name for name in self.cameras if name not in down}
            for name in busy:
                self.backlog[name] += 1.0
            while left > 1e-9 and busy:
                share = left / len(busy)
                for name in list(busy):
                    done = min(share, self.backlog[name])
                    self.backlog[name] -= done
                    left -= done
                    if self.backlog[name] <= 1e-9:
                        busy.remove(name)
            waits = [wait(name, self.backlog[name], priority) for name, priority in self.cameras.items()]
            if step := self.pressure.decide(waits, self.now_s):
                self.steps.append((self.now_s, step.down, step.cameras))


def fleet(critical: int, normal: int, background: int) -> dict[str, Priority]:
    counts = {Priority.CRITICAL: critical, Priority.NORMAL: normal, Priority.BACKGROUND: background}
    return {f"{priority}-{number}": priority for priority, count in counts.items() for number in range(count)}


def test_cameras_of_which_nothing_is_decoded_hide_no_backlog() -> None:
    """Most are away, asked nothing, or shed."""
    pressure = DecodePressure()
    away = [replace(wait(f"away-{number}", 0.0), decodes=False) for number in range(30)]
    step = pressure.decide([*away, *(wait(f"late-{number}", 2 * STRIDE_S) for number in range(10))], 0.0)
    assert pressure.behind == 2
    assert step is not None
    assert step.cameras == ("late-0",)


def test_nobody_gives_way_while_there_is_time() -> None:
    process = Process(fleet(2, 30, 8), capacity=40)
    process.run(600)
    assert process.steps == []
    assert process.pressure.behind == 0


def test_one_camera_that_is_late_by_itself_is_not_the_decoders_want() -> None:
    pressure = DecodePressure()
    for second in range(60):
        assert pressure.decide([wait("bad", 100.0), wait("one", 0.0), wait("two", 0.1)], float(second)) is None


def test_background_gives_way_first_and_the_rest_is_decoded_in_time() -> None:
    process = Process(fleet(4, 30, 6), capacity=37)
    for _ in range(600):
        process.run(1)
        whole = process.cameras.keys() - process.pressure.down
        assert max(process.backlog[name] for name in whole) < 0.7 * STRIDE_S
    lowered = {name for _, lower, names in process.steps if lower for name in names}
    assert len(lowered) >= 4
    assert all(name.startswith("background") for name in lowered)


def test_normal_cameras_follow_and_critical_ones_never() -> None:
    process = Process(fleet(20, 10, 10), capacity=10)
    process.run(200)
    assert process.pressure.down == {name for name in process.cameras if not name.startswith("critical")}
    assert process.pressure.behind > 1, "nobody else may give way: what is late is seen"


def test_they_come_back_the_most_urgent_first_and_in_steps() -> None:
    process = Process(fleet(0, 20, 20), capacity=10)
    process.run(120)
    down = process.pressure.down
    assert sum(name.startswith("normal") for name in down) >= 4
    process.capacity = 40
    until = process.now_s
    process.run(1500)
    assert process.pressure.down == frozenset()
    back = [(at_s, names) for at_s, lower, names in process.steps if not lower and at_s > until]
    order = [name for _, names in back for name in names]
    assert sorted(order) == sorted(down)
    assert [name.split("-")[0] for name in order] == sorted((name.split("-")[0] for name in order), reverse=True)
    assert all(later - sooner >= HOLD_S for (sooner, _), (later, _) in itertools.pairwise(back))


def test_at_the_edge_trying_becomes_rare() -> None:
    process = Process(fleet(0, 40, 0), capacity=37)
    process.run(3600)
    lowered = [at_s for at_s, lower, _ in process.steps if lower]
    assert len([at_s for at_s in lowered if at_s > 1800]) <= 6
    assert len(process.pressure.down) <= 8


def test_a_backlog_that_shrinks_costs_nobody_else() -> None:
    pressure = DecodePressure()
    names = [f"camera-{number}" for number in range(10)]
    assert pressure.decide([wait(name, 30.0) for name in names], 0.0) is not None
    behind_s, now_s = 30.0, 0.0
    while behind_s > 5.0:
        now_s += SETTLE_S
        behind_s *= 0.8
        assert pressure.decide([wait(name, behind_s) for name in names], now_s) is None


def test_a_camera_that_goes_is_forgotten() -> None:
    pressure = DecodePressure()
    names = [f"camera-{number}" for number in range(10)]
    step = pressure.decide([wait(name, 30.0) for name in names], 0.0)
    assert step is not None
    assert step.cameras == ("camera-0",)
    pressure.decide([wait(name, 30.0) for name in names[1:]], 1.0)
    assert pressure.down == frozenset()
    assert pressure.decide([], 2.0) is None


@settings(max_examples=60, deadline=None)
@given(
    critical=st.integers(0, 5),
    normal=st.integers(0, 30),
    background=st.integers(0, 30),
    share=st.floats(0.3, 1.2),
)
def test_whatever_the_load_those_that_stay_are_in_time(
    critical: int, normal: int, background: int, share: float
) -> None:
    cameras = fleet(critical, normal, background)
    process = Process(cameras, capacity=max(share * len(cameras), critical + 1.0))
    process.run(400)
    down = process.pressure.down
    assert not any(name.startswith("critical") for name in down)
    if any(name.startswith("normal") for name in down):
        raised = {name for _, lower, names in process.steps if not lower for name in names}
        assert {name for name in cameras if name.startswith("background")} <= down | raised
    assert process.pressure.behind <= 1.0


@pytest.mark.parametrize("count", [1, 2, 9])
def test_few_cameras_give_way_too(count: int) -> None:
    process = Process(fleet(0, count, 0), capacity=count - 0.5)
    process.run(120)
    assert 1 <= len({name for _, lower, names in process.steps if lower for name in names}) <= count
