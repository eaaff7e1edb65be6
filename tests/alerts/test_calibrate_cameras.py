"""Thresholds from reviewed incidents; every best threshold here is known by how the history was made."""

import random

import pytest

from cluster.alerts.calibration import count_incidents, propose_threshold
from cluster.alerts.timeline_store import ScoreBin
from cluster.errors import NotReadyError


def history(make, confirmed, rejected, subject="person"):
    levels = [(level, "confirmed") for level in confirmed] + [(level, "rejected") for level in rejected]
    return [
        make.incident(number, level=level, score=1.0, verdict=verdict, subject=subject)
        for number, (level, verdict) in enumerate(levels)
    ]


def minutes(*levels, start=0):
    """One bin a minute; a level of 0: no incident could have opened."""
    return [ScoreBin(60.0 * (start + i), level, level, 7, 0) for i, level in enumerate(levels)]


def test_levels_that_can_be_told_apart_are_told_apart_in_the_middle(make):
    found = propose_threshold("person", 0.5, history(make, [0.9, 0.8, 0.95], [0.55, 0.6, 0.52]))
    assert found.proposed == 0.7
    now, *_, last = found.trades
    assert (now.threshold, now.kept, now.avoided) == (0.5, 3, 0)
    best = next(each for each in found.trades if each.threshold == 0.7)
    assert (best.kept, best.confirmed, best.avoided, best.rejected) == (3, 3, 3, 3)
    assert last.threshold == 0.75
    assert "0.600, which was rejected, and 0.800, which was confirmed" in found.reason


def test_no_confirmed_incident_is_lost_unless_that_is_allowed(make):
    incidents = history(make, [0.58, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96], [0.55, 0.62, 0.7])
    assert propose_threshold("person", 0.5, incidents).proposed == 0.565
    # One of ten may go, and with it all three false alarms do.
    found = propose_threshold("person", 0.5, incidents, keep=0.9)
    assert found.proposed == 0.75
    best = next(each for each in found.trades if each.threshold == found.proposed)
    assert (best.kept, best.avoided) == (9, 3)


def test_one_that_need_not_be_lost_is_kept_though_it_may_be(make):
    found = propose_threshold("person", 0.5, history(make, [0.8, 0.9, 0.95], [0.55, 0.6]), keep=0.5)
    assert found.proposed == 0.7


@pytest.mark.parametrize(
    ("confirmed", "rejected", "reason"),
    [
        ([0.6, 0.7, 0.8, 0.9, 0.95], [], "no incident was rejected"),
        ([0.6, 0.7], [0.8, 0.9, 0.95], "scored as high as the confirmed"),
        ([0.6, 0.7], [0.6, 0.9, 0.95], "scored as high as the confirmed"),
    ],
)
def test_where_no_threshold_is_better_it_stays(make, confirmed, rejected, reason):
    found = propose_threshold("person", 0.5, history(make, confirmed, rejected))
    assert (found.proposed, len(found.trades)) == (0.5, 1)
    assert reason in found.reason


def test_false_alarms_alone_put_it_above_them(make):
    found = propose_threshold("person", 0.5, history(make, [], [0.5, 0.6, 0.7, 0.55, 0.8]))
    assert found.proposed == 0.9
    assert "none was confirmed" in found.reason


@pytest.mark.parametrize(("below", "above"), [(0.9993, 0.9998), (0.99991, 0.99995), (0.7004, 0.7006), (0.9999, 1.0)])
def test_levels_close_together_are_told_apart_too(make, below, above):
    """Of a model that is sure of its answers."""
    found = propose_threshold("person", 0.5, history(make, [above] * 3, [below] * 3))
    assert below < found.proposed <= above
    rejected, confirmed = (float(word.strip(",")) for word in found.reason.split() if word[0] in "01")
    assert rejected < confirmed
    assert found.proposed < 1, "no question may have a threshold of 1"
    assert all(0.5 <= each.threshold <= 1 for each in found.trades)
    best = next(each for each in found.trades if each.threshold == found.proposed)
    assert (best.kept, best.avoided) == (3, 3)


def test_it_is_never_lowered(make):
    """What a lower one would open, nobody has reviewed; those were confirmed when the threshold was lower."""
    found = propose_threshold("person", 0.85, history(make, [0.6, 0.9, 0.95], [0.5, 0.55]))
    assert found.proposed == 0.85


def test_too_little_says_how_much_is_missing(make):
    incidents = history(make, [0.9], [0.5, 0.6, 0.7]) + history(make, [0.9] * 9, [], subject="car")
    incidents += [make.incident(50)]
    with pytest.raises(NotReadyError, match="has 4 confirmed or rejected incidents, and 5 are needed"):
        propose_threshold("person", 0.5, incidents)


def test_incidents_of_a_history_are_counted_as_they_would_have_opened():
    history = minutes(0, 0.6, 0.7, 0, 0, 0.9, 0.55, 0, 0.65, 0)
    # Minutes 1-2, 5-6 and 8: at most a minute of quiet does not part two.
    assert count_incidents(history, 0.5) == 2
    assert count_incidents(history, 0.5, cooldown_s=0.0) == 3
    assert count_incidents(history, 0.6, cooldown_s=0.0) == 3
    assert count_incidents(history, 0.8) == 1
    assert count_incidents(history, 0.95) == 0
    assert count_incidents([], 0.1) == 0


def test_the_best_threshold_by_trying_them_all(make):
    """Over random histories: nothing between 0.5 and 1 keeps what must be kept and avoids more."""
    dice = random.Random(5)
    for _ in range(200):
        confirmed = [round(dice.uniform(0.5, 1.0), 2) for _ in range(dice.randrange(0, 8))]
        rejected = [round(dice.uniform(0.5, 0.9), 2) for _ in range(dice.randrange(5, 9))]
        keep = dice.choice([0.5, 0.8, 1.0])
        found = propose_threshold("person", 0.5, history(make, confirmed, rejected), keep=keep)

        def kept(threshold, levels=confirmed):
            return sum(level >= threshold for level in levels)

        allowed = [t / 200 for t in range(100, 200) if kept(t / 200) >= keep * len(confirmed) - 1e-9]
        most = max(len(rejected) - kept(t, rejected) for t in allowed)
        assert kept(found.proposed) >= keep * len(confirmed) - 1e-9
        assert len(rejected) - kept(found.proposed, rejected) == most
