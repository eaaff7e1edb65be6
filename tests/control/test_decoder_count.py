"""How many decoders are wanted: load adds one, quiet removes one, and what is neither changes nothing."""

from collections.abc import Iterable

import pytest

from cluster.config import CameraEntry, QuestionConfig, SightlineConfig, camera_settings
from cluster.control.decoders import DecoderCount
from cluster.control.directory import Directory
from cluster.types.reports import CameraReport, DecoderInfo, DecoderNumbers

HOLD_S = 10.0


def camera(name: str):
    questions = [QuestionConfig(id="fence", text="Is anyone climbing the fence?")]
    return camera_settings(SightlineConfig(), CameraEntry(name=name, questions=questions))


def counts(scale: DecoderCount, shares: Iterable[float], *, since_s: int = 0) -> list[int]:
    """The number after each second in which every decoder that is wanted is so busy."""
    found = []
    for at_s, share in enumerate(shares, since_s):
        scale.decide(dict.fromkeys(scale.names, share), float(at_s))
        found.append(scale.count)
    return found


def test_load_adds_one_after_each_hold_up_to_the_most() -> None:
    scale = DecoderCount(1, 3, HOLD_S)
    found = counts(scale, [0.9] * 40)
    assert [found.index(number) for number in (1, 2, 3)] == [0, 10, 21]
    assert found[-1] == 3


def test_a_burst_adds_none() -> None:
    assert set(counts(DecoderCount(1, 3, HOLD_S), ([0.9] * 9 + [0.7]) * 5)) == {1}


def test_quiet_removes_one_after_four_holds_down_to_the_least() -> None:
    scale = DecoderCount(1, 3, HOLD_S, count=3)
    found = counts(scale, [0.1] * 120)
    assert [found.index(number) for number in (2, 1)] == [40, 81]
    assert found[-1] == 1


def test_none_is_removed_whose_cameras_would_be_too_much_for_the_others() -> None:
    # 0.3 of three is 0.45 of two, but 0.6 of two is too much for one.
    scale = DecoderCount(1, 3, HOLD_S, count=3)
    assert counts(scale, [0.3] * 60)[-1] == 2
    assert set(counts(scale, [0.45] * 200, since_s=60)) == {2}


def test_nothing_changes_while_one_is_missing() -> None:
    scale = DecoderCount(1, 4, HOLD_S, count=2)
    for at_s in range(100):
        assert not scale.decide({"decoder-0": 1.0, "decoder-7": 1.0}, float(at_s))
    assert scale.count == 2


@pytest.mark.parametrize(("before", "count"), [(0, 2), (3, 3), (9, 4)])
def test_a_restarted_controller_goes_on_with_the_number_within_the_limits(before: int, count: int) -> None:
    assert DecoderCount(2, 4, HOLD_S, count=before).count == count


def test_a_fixed_number_stays() -> None:
    fixed = DecoderCount(2, 2, HOLD_S)
    assert set(counts(fixed, [1.0] * 100 + [0.0] * 100)) == {2}
    assert fixed.numbers(running=1) is None
    assert DecoderCount(1, 3, HOLD_S, count=2).numbers(running=1) == DecoderNumbers(1, wanted=2, least=1, most=3)


def test_cameras_leave_a_decoder_that_is_not_wanted_before_it_may_end() -> None:
    directory = Directory()
    for name in ("decoder-0", "decoder-1"):
        directory.join_decoder(DecoderInfo(name, name, f"{name}:1", f"{name}:2", 1), 0.0)
    for number in range(4):
        directory.add(camera(f"cam-{number}"))
    moving = {each.settings.name for each in directory.assignment("decoder-1").cameras}
    assert moving
    assert not directory.keep_decoders(["decoder-0", "decoder-1", "decoder-2"]), "decoder-2 has yet to join"
    version = directory.version
    assert directory.keep_decoders(["decoder-0"])
    assert directory.version > version
    assert not directory.keep_decoders(["decoder-0"]), "once"
    assert len(directory.assignment("decoder-0").cameras) == 4
    # It still runs them, and then says for the last time what they counted.
    for at_s in (1.0, 2.0):
        reports = [CameraReport(name, "running") for name in moving]
        assert directory.heartbeat_decoder("decoder-1", "decoder-1", reports, at_s, 0.5)
        assert directory.decoder_table.loads == {"decoder-0": 0.0, "decoder-1": 0.5}
    assert directory.heartbeat_decoder("decoder-1", "decoder-1", [], 3.0, 0.0)
    assert directory.decoder_table.loads == {"decoder-0": 0.0}
    # Wanted again, it takes cameras again.
    assert directory.keep_decoders(["decoder-0", "decoder-1"])
    assert set(directory.decoder_table.loads) == {"decoder-0", "decoder-1"}
    directory.leave_decoder("decoder-0")
    assert len(directory.assignment("decoder-1").cameras) == 4


def test_the_last_decoder_keeps_its_cameras_until_another_takes_them() -> None:
    directory = Directory()
    directory.join_decoder(DecoderInfo("decoder-1", "b", "b:1", "b:2", 1), 0.0)
    directory.add(camera("gate"))
    assert not directory.keep_decoders(["decoder-0"])
    assert directory.route("gate").decoder == "decoder-1"
    directory.join_decoder(DecoderInfo("decoder-0", "a", "a:1", "a:2", 1), 0.0)
    assert directory.keep_decoders(["decoder-0"])
    assert directory.route("gate").decoder == "decoder-0"
