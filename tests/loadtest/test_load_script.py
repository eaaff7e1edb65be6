"""What cameras send and when: determinism, phases, mixes, losses, and that packets make a stream."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_cluster import footage

from loadtest.profile import Profile, kind_at, packets, radical_inverse, script

CLIPS = {"busy": footage(fps=10, name="busy"), "quiet": footage(fps=10, name="quiet", gop=5)}


def test_the_same_seed_sends_the_same() -> None:
    profile = Profile(jitter_s=0.2, loss=0.1, seed=3)
    clips = {"busy": CLIPS["busy"]}
    runs = [list(islice(packets(profile, script(profile, 7), clips), 60)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != list(islice(packets(profile, script(profile, 8), clips), 60))


def test_packets_are_one_stream_over_every_seam() -> None:
    profile = Profile(fps=10)
    sent = list(islice(packets(profile, script(profile, 0), {"busy": CLIPS["busy"]}), 55))
    assert [due.packet.sequence for due in sent] == list(range(55))
    assert [due.packet.pts for due in sent] == [number * 100_000 for number in range(55)]
    assert [due.at_s for due in sent] == pytest.approx([number / 10 for number in range(55)])
    assert [due.packet.keyframe for due in sent] == [number % 10 == 0 for number in range(55)]
    # The footage's GOPs follow each other.
    gops = [due.packet.data[0] for due in sent if due.packet.keyframe]
    assert all(a != b for a, b in pairwise(gops))


@given(st.integers(1, 200))
def test_evenly_spaced_phases_leave_no_large_gap(count: int) -> None:
    phases = sorted(radical_inverse(number) for number in range(count))
    gaps = [b - a for a, b in pairwise([*phases, phases[0] + 1])]
    assert max(gaps) <= 2 / count


def test_phases_follow_the_profile() -> None:
    assert {script(Profile(phases="aligned"), number).phase for number in range(20)} == {0.0}
    drawn = [script(Profile(phases="random"), number).phase for number in range(400)]
    assert np.mean(drawn) == pytest.approx(0.5, abs=4 * 0.29 / 20)
    assert script(Profile(seed=1), 5).phase != script(Profile(seed=2), 5).phase


def test_a_mix_is_met_by_any_number_of_cameras() -> None:
    profile = Profile(mix={"busy": 3, "quiet": 1})
    kinds = [kind_at(profile, script(profile, number).rank, 0.0) for number in range(40)]
    assert abs(kinds.count("busy") - 30) <= 2


def test_at_night_nobody_is_busy_and_at_noon_everybody() -> None:
    profile = Profile(mix={"busy": 1.0, "quiet": 0.0}, day_s=100.0)
    ranks = [script(profile, number).rank for number in range(40)]
    busy = [sum(kind_at(profile, rank, at_s) == "busy" for rank in ranks) for at_s in (0, 25, 50, 100)]
    assert busy[0] == busy[3] == 0
    assert abs(busy[1] - 20) <= 2
    assert busy[2] == 40


def test_footage_changes_at_a_keyframe_when_the_day_breaks() -> None:
    profile = Profile(mix={"busy": 1.0, "quiet": 0.0}, day_s=20.0, fps=10)
    camera = script(profile, 1)
    sent = list(islice(packets(profile, camera, CLIPS), 150))
    lengths = np.diff([due.packet.sequence for due in sent if due.packet.keyframe])
    # Quiet GOPs have five packets, busy ones ten.
    assert set(lengths) == {5, 10}
    assert [due.packet.pts for due in sent] == [number * 100_000 for number in range(150)]


def test_jitter_delays_and_never_overtakes() -> None:
    profile = Profile(jitter_s=0.35, fps=10)
    sent = list(islice(packets(profile, script(profile, 0), {"busy": CLIPS["busy"]}), 400))
    late = [due.at_s - due.packet.dts / 1e6 for due in sent]
    assert min(late) >= 0
    assert max(late) <= 0.35
    assert np.mean(late) > 0.1
    assert all(a.at_s <= b.at_s for a, b in pairwise(sent))


def test_losses_are_holes_in_the_numbers() -> None:
    profile = Profile(loss=0.25)
    sent = list(islice(packets(profile, script(profile, 0), {"busy": CLIPS["busy"]}), 1000))
    lost = sum(due.lost for due in sent)
    assert lost == pytest.approx(250, abs=4 * 14)
    assert [due.packet.sequence for due in sent] == list(range(1000))
