"""WindowPhases spread the windows of a replica over the stride, and stay with a camera that moves warm."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.replica_load import SLOTS, WindowPhases


def fullest(phases: list[tuple[float, float]], parts: int) -> float:
    """The load of the fullest of ``parts`` equal stretches of the stride."""
    sums = [0.0] * parts
    for phase, load in phases:
        sums[int(phase * parts)] += load
    return max(sums)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=400))
@settings(deadline=None, max_examples=40)
def test_no_stretch_is_above_the_mean_by_more_than_a_camera(loads) -> None:
    phases = WindowPhases()
    placed = [(phases.add(f"c{n}", 8.0, load), load) for n, load in enumerate(loads)]
    assert all(0 <= phase < 1 for phase, _ in placed)
    assert fullest(placed, SLOTS) <= sum(loads) / SLOTS + max(loads) + 1e-9


def test_a_few_cameras_stand_apart() -> None:
    phases = WindowPhases()
    found = sorted(phases.add(f"c{n}", 8.0, 1.0) for n in range(8))
    gaps = [b - a for a, b in zip(found, [*found[1:], found[0] + 1], strict=True)]
    assert min(gaps) > 0.4 / 8


def test_those_that_leave_make_room_and_those_that_come_back_keep_their_phase() -> None:
    phases = WindowPhases()
    found = {f"c{n}": phases.add(f"c{n}", 8.0, 1.0) for n in range(SLOTS)}
    assert phases.remove("c7") == found["c7"]
    assert phases.remove("c7") is None
    assert int(phases.add("new", 8.0, 1.0) * SLOTS) == int(found["c7"] * SLOTS)
    assert phases.add("c7", 8.0, 1.0, phase=found["c7"]) == found["c7"] == phases.phase_of("c7")


def test_cameras_of_another_stride_are_spread_among_themselves() -> None:
    phases = WindowPhases()
    for number in range(10):
        phases.add(f"slow{number}", 8.0, 5.0)
    quick = [(phases.add(f"quick{n}", 1.0, 1.0), 1.0) for n in range(SLOTS)]
    assert fullest(quick, SLOTS) == 1.0
