"""From answers to incidents: windows in a row, hysteresis, cooldown, repeats, gaps, restarts, mutes."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from alert_parts import Make
from doc_parts import ROOT, blocks, read
from hypothesis import given
from hypothesis import strategies as st

from cluster.alerts.incident import Incident, Mute
from cluster.alerts.open_incidents import OpenIncidents
from cluster.alerts.tracker import OVER_S, IncidentTracker, Rule
from cluster.errors import NotReadyError

RULE = Rule(cooldown_s=0.0, update_s=16.0)
NOW = 1_700_000_000.0


class Desk:
    """A tracker over a open_incidents, and everything it has told."""

    def __init__(self, rule: Rule | None = RULE, salt: str = "here") -> None:
        self.open_incidents = OpenIncidents(salt)
        self.rule = rule
        self.tracker = IncidentTracker(self.open_incidents, lambda _camera, _question: self.rule)
        self.tracks: dict = {}
        self.told = []

    def take(self, *answers, now_s=NOW):
        for answer in answers:
            self.tracker.add_answer(answer, now_s)
        return self.collect()

    def tick(self, now_s):
        self.tracker.tick(now_s)
        return self.collect()

    def collect(self):
        changes = self.open_incidents.pop_changes()
        self.tracks |= changes.tracks
        self.told += changes.events.values()
        return [(event.kind, event.incident.start, event.incident.end) for event in changes.events.values()]

    def restarted(self, now_s=NOW) -> Desk:
        """Another process that knows what this one wrote, as JSON."""
        other = Desk(self.rule)
        other.open_incidents.load(self.open_incidents.oldest_first, self.open_incidents.mutes(NOW), NOW)
        kept = {where: json.loads(json.dumps(track)) for where, track in self.tracks.items() if track is not None}
        other.tracker.load(kept, now_s)
        other.tracks = dict(self.tracks)
        return other


def s(seconds: float) -> int:
    return round(seconds * 1_000_000)


def test_an_incident_opens_grows_and_ends(make):
    """Two in a row open it; it is told again after 16 s of the camera's clock; two below the lower bar end it."""
    desk = Desk()
    assert desk.take(make.answer(0, 0.2), make.answer(1, 0.9)) == []
    assert desk.take(make.answer(2, 0.8)) == [("new", 0, s(24))]
    assert desk.take(make.answer(3, 0.95)) == []
    assert desk.take(make.answer(4, 0.45)) == [("update", 0, s(40))]
    assert desk.take(make.answer(5, 0.1)) == []
    assert desk.take(make.answer(6, 0.2)) == [("end", 0, s(40))]
    new, _, end = desk.told
    assert new.incident.score == 0.9
    assert (end.incident.score, end.incident.windows, end.incident.open) == (0.95, 4, False)
    assert [event.key for event in desk.told] == [f"{new.incident.id}-{number}" for number in (1, 2, 3)]


def test_a_removed_camera_leaves_its_clocks_shift_to_no_other_of_its_name(make):
    desk = Desk()
    shifts = {"gate": s(26), "yard": s(3)}
    desk.take(*(replace(make.answer(0, camera=name), memory_shift=shift) for name, shift in shifts.items()))
    desk.open_incidents.forget_camera("gate")
    assert desk.open_incidents.memory_shifts == {"yard": s(3)}


def test_an_incident_has_the_shift_from_its_cameras_clock_to_its_memorys(make):
    desk = Desk()
    desk.take(make.answer(0), make.answer(1))
    restarted = [replace(make.answer(n), incarnation="b", memory_shift=s(26)) for n in range(2)]
    desk.take(*restarted)
    opened = [event.incident for event in desk.told if event.kind == "new"]
    assert [(each.start, each.memory_shift) for each in opened] == [(0, 0), (0, s(26))]


def test_one_positive_window_is_none(make):
    desk = Desk()
    assert desk.take(*(make.answer(n, 0.9 if n % 2 else 0.1) for n in range(20))) == []


@pytest.mark.parametrize("consecutive", [1, 2, 5])
def test_consecutive(make, consecutive):
    desk = Desk(replace(RULE, consecutive=consecutive))
    assert desk.take(*(make.answer(n) for n in range(consecutive - 1))) == []
    assert [kind for kind, *_ in desk.take(make.answer(consecutive - 1))] == ["new"]


def test_hysteresis_holds_an_open_incident_and_opens_none(make):
    desk = Desk(replace(RULE, hysteresis=0.2, update_s=1e9))
    assert desk.take(*(make.answer(n, 0.4) for n in range(5))) == []
    desk.take(make.answer(5), make.answer(6))
    assert desk.take(*(make.answer(n, 0.31) for n in range(7, 20))) == []
    assert [kind for kind, *_ in desk.take(make.answer(20, 0.29), make.answer(21, 0.29))] == ["end"]


def test_an_incident_of_a_low_threshold_ends_too(make):
    """Threshold 0.05, hysteresis 0.1: scores below 0.025 end it."""
    desk = Desk(replace(RULE, threshold=0.05, update_s=1e9))
    answers = [replace(make.answer(n, score), positive=score >= 0.05) for n, score in enumerate([0.3, 0.3, 0.03, 0.02])]
    assert [kind for kind, *_ in desk.take(*answers)] == ["new"]
    assert [kind for kind, *_ in desk.take(replace(make.answer(4, 0.01), positive=False))] == ["end"]


def test_cooldown_counts_on_the_cameras_clock(make):
    """Ended at 16 s; windows end at 48, 56 s …: with 60 s of cooldown the first that may open one ends at 80 s."""
    desk = Desk(replace(RULE, cooldown_s=60.0, release=1))
    assert desk.take(make.answer(0), make.answer(1), make.answer(2, 0.0)) == [("new", 0, s(16)), ("end", 0, s(16))]
    opened = [n for n in range(5, 12) if desk.take(make.answer(n))]
    assert [(n + 1) * 8 for n in opened][:1] == [80]


def test_a_minute_of_short_strides_that_comes_again_counts_once(make):
    """Five windows a second, of which replicas send those of the last minute to a restarted process."""
    windows = [make.answer(n, end=s(0.2 * (n + 1))) for n in range(400)]
    desk = Desk(replace(RULE, update_s=1e9))
    assert desk.take(*windows[:300]) == [("new", 0, s(0.4))]
    other = desk.restarted()
    assert other.take(*windows) == []
    [incident] = other.open_incidents.oldest_first
    assert (incident.windows, incident.end) == (400, s(80))


def test_an_answer_that_comes_again_counts_once(make):
    desk = Desk()
    assert desk.take(make.answer(3), make.answer(3), make.answer(3)) == []
    assert [kind for kind, *_ in desk.take(make.answer(4))] == ["new"]
    assert desk.take(make.answer(3), make.answer(4)) == []


def test_windows_that_do_not_touch_are_not_in_a_row(make):
    desk = Desk()
    assert desk.take(make.answer(0), make.answer(50, end=s(400))) == []
    assert [kind for kind, *_ in desk.take(make.answer(51, end=s(408)))] == ["new"]
    assert [kind for kind, *_ in desk.take(make.answer(90, end=s(800)))] == ["end"]
    assert desk.told[-1].incident.reason == "no answer in between"


def test_a_camera_whose_clock_begins_anew(make):
    """A decoder was restarted: window numbers go on, times begin again. The old incident ends, a new one may open."""
    desk = Desk(replace(RULE, cooldown_s=3600.0))
    desk.take(make.answer(100), make.answer(101))
    told = desk.take(make.answer(102, end=s(8)), make.answer(103, end=s(16)))
    assert [kind for kind, *_ in told] == ["end", "new"]
    assert desk.told[1].incident.reason == "the camera's clock restarted"
    assert desk.told[1].incident.id != desk.told[2].incident.id


@pytest.mark.parametrize("restarted", [False, True])
def test_an_answer_of_a_replica_that_had_the_camera_before_comes_too_late(make, restarted):
    """It could not be reached, and another one has the camera: the clock did not restart, and nothing ends."""
    desk = Desk()
    late = [replace(make.answer(n), incarnation="a", age_s=40.0) for n in (2, 3)]
    desk.take(replace(make.answer(0), incarnation="a"), replace(make.answer(1), incarnation="a"))
    desk.take(*(replace(make.answer(n), incarnation="b") for n in (4, 5)), now_s=NOW + 32)
    if restarted:
        desk = desk.restarted(NOW + 40)
    assert [desk.tracker.add_answer(each, NOW + 50) for each in late] == [False, False]
    assert desk.take(replace(make.answer(6), incarnation="b"), now_s=NOW + 52) == [("update", 0, s(56))]
    restart = replace(make.answer(0), incarnation="c")
    assert [kind for kind, *_ in desk.take(restart, now_s=NOW + 60)] == ["end"]


def test_a_silent_camera_ends_its_incident(make):
    desk = Desk()
    desk.take(make.answer(0), make.answer(1))
    assert desk.tick(NOW + 299) == []
    assert [kind for kind, *_ in desk.tick(NOW + 301)] == ["end"]
    assert desk.tick(NOW + 9999) == []


def test_a_question_that_is_not_asked_any_more_ends_its_incident(make):
    desk = Desk()
    desk.take(make.answer(0), make.answer(1))
    desk.rule = None
    assert [kind for kind, *_ in desk.tick(NOW + 1)] == ["end"]
    assert desk.tracks[("gate", "person")] is None
    assert desk.take(make.answer(2), make.answer(3)) == []


def test_a_stream_that_is_opened_again_counts_from_zero_and_nothing_is_taken_for_a_repeat(make):
    desk = Desk(replace(RULE, cooldown_s=0.0))
    first = [replace(make.answer(n, score=0.1), incarnation="first") for n in range(3)]
    second = [replace(make.answer(n), incarnation="second") for n in range(3)]
    assert desk.take(*first) == []
    assert [kind for kind, *_ in desk.take(*second)] == ["new"]
    # A replica sends again what it has, to whoever connects.
    assert desk.take(*first, *second) == []


def test_a_camera_that_is_added_again_has_no_past_not_even_after_a_restart(make):
    desk = Desk(replace(RULE, cooldown_s=3600.0))
    desk.tracker.retain_cameras({"gate": "a"}, NOW)
    desk.take(make.answer(0), make.answer(1))
    desk = desk.restarted()
    desk.tracker.retain_cameras({"gate": "a"}, NOW)
    assert desk.collect() == [], "it is the same one"
    desk.tracker.retain_cameras({"gate": "b"}, NOW)
    assert [kind for kind, *_ in desk.collect()] == ["end"]
    assert desk.told[-1].incident.reason == "the camera was removed"
    # No pause after the other one's incident either.
    assert [kind for kind, *_ in desk.take(make.answer(2), make.answer(3))] == ["new"]
    desk.tracker.retain_cameras({}, NOW)
    assert [kind for kind, *_ in desk.collect()] == ["end"]


def test_a_question_that_is_reworded_is_another_one(make):
    desk = Desk(replace(RULE, cooldown_s=3600.0, text="Is anyone on the roof?"))
    assert [kind for kind, *_ in desk.take(make.answer(0), make.answer(1))] == ["new"]
    desk.rule = replace(desk.rule, text="Is a car at the gate?")
    assert [kind for kind, *_ in desk.take(make.answer(2))] == ["end"]
    assert desk.told[-1].incident.reason == "the question was changed"
    assert [kind for kind, *_ in desk.take(make.answer(3))] == ["new"], "a second window that says yes to this one"


def test_cameras_and_questions_are_apart(make):
    desk = Desk()
    told = desk.take(*(make.answer(n, camera=c, question=q) for n in (0, 1) for c in "ab" for q in ("x", "y")))
    assert [kind for kind, *_ in told] == ["new"] * 4
    assert len({event.incident.id for event in desk.told}) == 4


@given(
    scores=st.lists(st.sampled_from([0.0, 0.3, 0.45, 0.6, 0.9]), max_size=40),
    cut=st.integers(0, 40),
    again=st.integers(0, 12),
)
def test_a_restart_in_the_middle_changes_nothing(scores, cut, again):
    """Whatever is answered, and wherever the process is replaced by one that gets the last answers again: the same
    events with the same keys."""
    answers = [Make().answer(n, score) for n, score in enumerate(scores)]
    whole = Desk(replace(RULE, cooldown_s=20.0))
    whole.take(*answers)
    first = Desk(whole.rule)
    first.take(*answers[:cut])
    second = first.restarted()
    second.take(*answers[max(0, cut - again) :])
    assert first.told + second.told == whole.told


@given(scores=st.lists(st.floats(0, 1), max_size=60))
def test_events_make_sense_for_any_scores(scores):
    desk = Desk(replace(RULE, cooldown_s=30.0))
    desk.take(*(Make().answer(n, score) for n, score in enumerate(scores)))
    by_incident: dict[str, list] = {}
    for event in desk.told:
        by_incident.setdefault(event.incident.id, []).append(event)
    for events in by_incident.values():
        kinds = [event.kind for event in events]
        assert kinds[0] == "new"
        assert set(kinds[1:-1]) <= {"update"}
        assert "end" not in kinds[:-1]
        ends = [event.incident.end for event in events]
        assert ends == sorted(ends)
    assert len({event.key for event in desk.told}) == len(desk.told)
    still = [events for events in by_incident.values() if events[-1].kind != "end"]
    assert len(still) == len(desk.open_incidents.oldest_first) <= 1


def test_what_is_muted_is_recorded_and_not_told(make):
    desk = Desk()
    desk.open_incidents.mute(Mute("gate", "*", NOW + 100), NOW)
    # It goes on for minutes, and has begun once.
    desk.take(*map(make.answer, range(6)))
    assert [(event.kind, event.silent) for event in desk.told] == [("new", True), ("update", True), ("update", True)]
    # The mute is over while it goes on: now it is news.
    desk.take(make.answer(6), make.answer(7), now_s=NOW + 101)
    assert [(event.kind, event.silent) for event in desk.told[3:]] == [("new", False)]
    # Muted again: what was announced is still called off.
    desk.open_incidents.mute(Mute("*", "person", NOW + 300), NOW + 102)
    desk.take(make.answer(8, 0.0), make.answer(9, 0.0), now_s=NOW + 103)
    assert [(event.kind, event.silent) for event in desk.told[4:]] == [("end", False)]


def test_an_incident_nobody_heard_of_ends_without_a_word(make):
    desk = Desk()
    desk.open_incidents.mute(Mute("*", "*", NOW + 100), NOW)
    desk.take(make.answer(0), make.answer(1), make.answer(2, 0.0), make.answer(3, 0.0))
    assert [(event.kind, event.silent) for event in desk.told] == [("new", True), ("end", True)]


def test_mutes_are_named_lifted_and_forgotten(make):
    open_incidents = Desk().open_incidents
    open_incidents.mute(Mute("gate", "person", NOW + 10, "ann"), NOW)
    open_incidents.mute(Mute("yard", "*", NOW + 5, "bob"), NOW)
    assert [mute.by for mute in open_incidents.mutes(NOW)] == ["bob", "ann"]
    assert [mute.by for mute in open_incidents.mutes(NOW + 6)] == ["ann"]
    assert open_incidents.unmute("gate", "person")
    assert not open_incidents.unmute("gate", "person")


def test_acknowledging_is_told_once(make):
    desk = Desk()
    desk.take(make.answer(0), make.answer(1))
    [incident] = desk.open_incidents.oldest_first
    desk.open_incidents.acknowledge(incident.id, "ann", NOW)
    desk.open_incidents.acknowledge(incident.id, "bob", NOW + 5)
    assert [kind for kind, *_ in desk.collect()] == ["update"]
    assert desk.open_incidents.oldest_first[0].acknowledged_by == "ann"
    with pytest.raises(NotReadyError, match="no incident 'nothing' is open"):
        desk.open_incidents.acknowledge("nothing", "ann", NOW)


def test_two_sites_never_give_the_same_id(make):
    here, there = Desk(salt="a"), Desk(salt="b")
    here.take(make.answer(0), make.answer(1))
    there.take(make.answer(0), make.answer(1))
    assert here.told[0].incident.id != there.told[0].incident.id


def test_the_json_form(make):
    """What receivers rely on; a key may be added, none may change."""
    desk = Desk()
    desk.take(make.answer(0, 0.75), make.answer(1, 0.5))
    body = json.loads(json.dumps(desk.told[0].body()))
    incident = body.pop("incident")
    assert body == {"format": 1, "key": f"{incident['id']}-1", "event": "new", "at": "2023-11-14T22:13:20.000Z"}
    assert incident == {
        "id": incident["id"],
        "camera": "gate",
        "kind": "question",
        "subject": "person",
        "severity": "warning",
        "state": "open",
        "start_us": 0,
        "end_us": 16_000_000,
        "score": 0.75,
        "windows": 2,
        "opened_at": "2023-11-14T22:13:20.000Z",
        "updated_at": "2023-11-14T22:13:20.000Z",
        "ended_at": None,
        "text": "",
        "reason": "",
        "acknowledged_by": "",
        "snapshot_url": "",
        "clip_url": "",
        "clip": "",
        "footage_note": "",
        "question": "",
    }
    [shown] = [json.loads(text) for text in blocks(read(ROOT / "docs" / "alerts.md"), "json")]
    assert shown.pop("incident").keys() == incident.keys()
    assert shown.keys() == body.keys()


def test_a_video_that_is_over_leaves_nothing_open(make):
    """Not at once: windows may still be queued."""
    desk = Desk()
    desk.take(make.answer(0), make.answer(1))
    desk.tracker.tick(NOW + OVER_S, {"gate"})
    assert desk.open_incidents.oldest_first
    desk.tracker.tick(NOW + OVER_S + 1, {"yard"})
    assert desk.open_incidents.oldest_first
    desk.tracker.tick(NOW + OVER_S + 1, {"gate"})
    assert not desk.open_incidents.oldest_first
    desk.collect()
    assert desk.told[-1].incident.reason == "the video is over"


def test_thousands_of_mutes_do_not_slow_down_thousands_of_alerts():
    """A line under maintenance, muted camera by camera, while all cameras lose their network."""
    desk = Desk()
    desk.open_incidents.load([], [Mute(f"km-{number}", "*", NOW + 60) for number in range(5000)], NOW)
    opening = Incident("", "", "health", "camera-offline", "critical", opened_s=NOW)
    began_s = time.thread_time()
    muted = [
        desk.open_incidents.open_incident(replace(opening, camera=f"km-{number}"), "first").muted
        for number in range(4000, 6000)
    ]
    assert time.thread_time() - began_s < 0.7
    assert muted == [True] * 1000 + [False] * 1000


def test_an_incident_does_not_end_before_it_opened(make):
    """The clock was an hour ahead; receivers compute how long it lasted."""
    desk = Desk()
    desk.take(make.answer(0), make.answer(1), now_s=NOW + 3600)
    desk.tracker.shift(-3600.0)
    desk.tick(NOW + 301)
    ended = desk.told[-1]
    assert (ended.kind, ended.at_s) == ("end", NOW + 301)
    assert (ended.incident.opened_s, ended.incident.ended_s) == (NOW + 3600, NOW + 3600)


@pytest.mark.parametrize(
    ("camera", "subject", "until_s", "muted"),
    [
        ("gate", "fence", 1.0, True),
        ("gate", "*", 1.0, True),
        ("*", "fence", 1.0, True),
        ("*", "*", 1.0, True),
        ("gate", "car", 1.0, False),
        ("yard", "*", 1.0, False),
        ("*", "car", 1.0, False),
        ("gate", "fence", -1.0, False),
    ],
)
def test_a_mute_is_of_its_camera_and_subject_and_time(camera, subject, until_s, muted):
    incidents = OpenIncidents("here")
    incidents.load([], [Mute(camera, subject, NOW + until_s)], NOW)
    opening = Incident("", "gate", "question", "fence", "warning", opened_s=NOW)
    assert incidents.open_incident(opening, "first").muted is muted
