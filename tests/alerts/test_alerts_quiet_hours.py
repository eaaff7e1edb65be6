"""Quiet hours: by hand, across midnight, time zones and the change of clocks; what began before them is ended."""

from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

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


def test_what_is_sent_in_them():
    sink = SinkConfig(name="phone", kind="log", quiet_hours=NOON)
    day, quiet, after = at("2030-01-31T11:00"), at("2030-01-31T12:30"), at("2030-01-31T14:00")
    assert sink.wants("gate", "warning", "new", day, day)
    assert not sink.wants("gate", "warning", "new", quiet, quiet)
    assert not sink.wants("gate", "warning", "update", quiet, day)
    assert sink.wants("gate", "critical", "new", quiet, quiet)
    assert sink.wants("gate", "warning", "end", quiet, day), "it was told to have begun"
    assert not sink.wants("gate", "warning", "end", quiet, quiet), "nobody was told that it began"
    assert sink.wants("gate", "warning", "update", after, quiet)
    silent = SinkConfig(name="phone", kind="log", quiet_hours={"start": "12:00", "end": "13:00", "min_severity": None})
    assert not silent.wants("gate", "critical", "new", quiet, quiet)


@pytest.mark.parametrize(
    "wrong", [{"start": "24:00"}, {"end": "6:30"}, {"timezone": "Mars/Base"}, {"start": "06:30"}, {"timezone": "../x"}]
)
def test_what_they_are_not(wrong):
    with pytest.raises(ValidationError):
        QuietHoursConfig(**{"start": "22:00", "end": "06:30", **wrong})
