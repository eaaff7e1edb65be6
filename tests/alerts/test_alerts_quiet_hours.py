"""Quiet hours: by hand, across midnight, time zones and the change of clocks; every sink hears a ``new`` first."""

from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from cluster.alerts.incident import Delivery, Incident
from cluster.alerts.open_incidents import OpenIncidents
from cluster.alerts.routing import SinkRoutes
from cluster.alerts.store import event_of, text_of
from cluster.config.alerts import QuietHoursConfig, SinkConfig

NIGHT = QuietHoursConfig(start="22:00", end="06:30", timezone="Europe/Berlin")
NOON = QuietHoursConfig(start="12:00", end="13:00")


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("hours", "moment", "covered"),
    [
        # Berlin is an hour ahead of UTC in winter, two in summer.
        (NIGHT, "2030-01-31T20:59", False),
        (NIGHT, "2030-01-31T21:00", True),
        (NIGHT, "2030-02-01T05:29", True),
        (NIGHT, "2030-02-01T05:30", False),
        (NIGHT, "2030-07-31T19:59", False),
        (NIGHT, "2030-07-31T20:00", True),
        (NIGHT, "2030-08-01T04:30", False),
        (NOON, "2030-01-31T11:59", False),
        (NOON, "2030-01-31T12:00", True),
        (NOON, "2030-01-31T13:00", False),
    ],
)
def test_when_they_are(hours, moment, covered):
    assert hours.covers(at(moment)) == covered


@pytest.mark.parametrize(
    ("hours", "moment", "over"),
    [
        (NIGHT, "2030-01-31T20:59", "2030-01-31T20:59"),
        (NIGHT, "2030-01-31T21:00", "2030-02-01T05:30"),
        (NIGHT, "2030-02-01T00:15", "2030-02-01T05:30"),
        # The night in which Berlin's clocks go ahead.
        (NIGHT, "2030-03-30T23:00", "2030-03-31T04:30"),
        (NOON, "2030-01-31T12:00", "2030-01-31T13:00"),
        (NOON, "2030-01-31T13:00", "2030-01-31T13:00"),
    ],
)
def test_when_they_are_over(hours, moment, over):
    assert hours.end_after(at(moment)) == at(over)


@pytest.mark.parametrize(
    ("moment", "over"),
    # 02:15 twice: the first time, and an hour later, when the clocks have gone back.
    [("2030-10-27T00:15", "2030-10-27T00:30"), ("2030-10-27T01:15", "2030-10-27T01:30")],
)
def test_when_they_are_over_in_an_hour_that_the_clocks_repeat(moment, over):
    hours = QuietHoursConfig(start="22:00", end="02:30", timezone="Europe/Berlin")
    assert [hours.covers(at(each)) for each in (moment, over)] == [True, False]
    assert hours.end_after(at(moment)) == at(over)


@pytest.mark.parametrize(
    ("moment", "over"), [("2027-03-27T22:00", "2027-03-28T01:00"), ("2027-03-28T00:59", "2027-03-28T01:00")]
)
def test_when_they_are_over_in_an_hour_that_the_clocks_skip(moment, over):
    """02:30 never comes: it has passed when 02:00 becomes 03:00."""
    hours = QuietHoursConfig(start="22:00", end="02:30", timezone="Europe/Berlin")
    assert [hours.covers(at(each)) for each in (moment, over)] == [True, False]
    assert hours.end_after(at(moment)) == at(over)


# Clocks that change by an hour, by half of one, by two, at midnight, and backwards in spring.
ZONES = "Europe/Berlin", "Australia/Lord_Howe", "Antarctica/Troll", "Africa/Cairo", "Africa/Casablanca"


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("22:00", "02:30"),
        ("02:15", "05:00"),
        ("02:10", "02:20"),
        ("02:30", "02:15"),
        ("00:20", "23:50"),
        ("23:30", "00:30"),
    ],
)
def test_around_every_change_of_clocks_they_follow_the_clock_on_the_wall(zone, start, end):
    hours = QuietHoursConfig(start=start, end=end, timezone=zone)
    begin, minutes = int(at("2027-01-01T00:00")), 365 * 24 * 60
    offsets = [datetime.fromtimestamp(begin + 3600 * n, ZoneInfo(zone)).utcoffset() for n in range(minutes // 60)]
    changes = [hour for hour, (one, other) in enumerate(pairwise(offsets), 1) if one != other]
    assert len(changes) >= 2
    for hour in changes:
        moments = range(begin + 3600 * (hour - 28), begin + 3600 * (hour + 52), 60)
        wall = [f"{datetime.fromtimestamp(each, ZoneInfo(zone)):%H:%M}" for each in moments]
        quiet = [start <= each < end if start < end else each >= start or each < end for each in wall]
        assert [hours.covers(each + 30) for each in moments] == quiet
        # Each is over at the next minute that is not quiet.
        over = [0] * len(quiet)
        for n in reversed(range(len(quiet))):
            over[n] = (over[n + 1] if n + 1 < len(quiet) else 0) if quiet[n] else moments[n]
        known = [n for n in range(0, 52 * 60, 37) if quiet[n]]
        assert [hours.end_after(moments[n] + 30) for n in known] == [over[n] for n in known]


DAY = "2030-01-31T11:00"
QUIET = "2030-01-31T12:10", "2030-01-31T12:50"
AFTER = "2030-01-31T13:30", "2030-01-31T14:00"
NEXT_QUIET = "2030-02-01T12:10", "2030-02-01T12:30"


@pytest.mark.parametrize(
    ("moments", "told"),
    [
        # The first moment opens the incident, the last ends it.
        ((DAY, *QUIET), ["new", "end"]),
        ((DAY, *AFTER), ["new", "update", "end"]),
        (QUIET, []),
        ((*QUIET, *AFTER), ["new", "end"]),
        ((*QUIET, *AFTER, *NEXT_QUIET), ["new", "update", "end"]),
        ((QUIET[0], AFTER[0]), []),
    ],
)
@pytest.mark.parametrize("events", [["new", "update", "end"], ["new", "end"]])
def test_what_a_sink_is_told(moments, told, events):
    routes = SinkRoutes([SinkConfig(name="phone", kind="log", quiet_hours=NOON, events=events)])
    incidents = OpenIncidents("salt")
    opened, *going_on, ended = map(at, moments)
    incident = incidents.open_incident(
        Incident("", "gate", "question", "person", "warning", 0, 1, 0.0, 0, opened, opened), "first"
    )
    for now_s in going_on:
        incident = incidents.extend_incident(incident, now_s, tell=True)
    incidents.end_incident("gate", "person", ended, "over")
    recorded = list(incidents.pop_changes().events.values())
    sent = [delivery for event in recorded for delivery in routes.deliveries(event)]
    assert [delivery.event.kind for delivery in sent] == [kind for kind in told if kind in events]
    # Read again after a restart, from the recorded event.
    by_key = {event.key: event for event in recorded}
    stored = [Delivery(event_of(text_of(by_key[each.event.key])), each.sink) for each in sent]
    assert list(map(routes.as_seen, stored)) == sent


def test_who_gets_what():
    sink = SinkConfig(name="phone", kind="log", quiet_hours=NOON)
    assert sink.quiet_for("warning") == NOON
    assert sink.quiet_for("critical") is None, "grave ones are sent all the same"
    silent = SinkConfig(name="phone", kind="log", quiet_hours={"start": "12:00", "end": "13:00", "min_severity": None})
    assert silent.quiet_for("critical") == silent.quiet_hours
    picky = SinkConfig(name="phone", kind="log", min_severity="warning", cameras=["gate*"])
    assert picky.wants("gate-2", "warning")
    assert not picky.wants("gate-2", "info")
    assert not picky.wants("yard", "critical")


@pytest.mark.parametrize(
    "wrong", [{"start": "24:00"}, {"end": "6:30"}, {"timezone": "Mars/Base"}, {"start": "06:30"}, {"timezone": "../x"}]
)
def test_what_they_are_not(wrong):
    with pytest.raises(ValidationError):
        QuietHoursConfig(**{"start": "22:00", "end": "06:30", **wrong})
