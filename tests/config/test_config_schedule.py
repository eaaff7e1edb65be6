"""When a question is asked: days, hours and time zones against a calendar."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from cluster.config import load_config
from cluster.config.camera import ScheduleConfig
from cluster.errors import ConfigError


def at(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


# 2026-11-23 is a Monday (cal 11 2026).
@pytest.mark.parametrize(
    ("schedule", "moment", "zone", "asked"),
    [
        ({}, "2026-11-23T03:00", "UTC", True),
        ({"days": ["mon"]}, "2026-11-23T23:59", "UTC", True),
        ({"days": ["mon"]}, "2026-11-24T00:00", "UTC", False),
        ({"hours": ["08:00-18:00"]}, "2026-11-23T08:00", "UTC", True),
        ({"hours": ["08:00-18:00"]}, "2026-11-23T18:00", "UTC", False),
        ({"hours": ["08:00-12:00", "13:00-24:00"]}, "2026-11-23T12:30", "UTC", False),
        ({"hours": ["08:00-12:00", "13:00-24:00"]}, "2026-11-23T23:59", "UTC", True),
        # Over midnight: Friday's hours reach into Saturday, Saturday's own do not begin.
        ({"days": ["fri"], "hours": ["22:00-06:00"]}, "2026-11-27T22:30", "UTC", True),
        ({"days": ["fri"], "hours": ["22:00-06:00"]}, "2026-11-28T05:59", "UTC", True),
        ({"days": ["fri"], "hours": ["22:00-06:00"]}, "2026-11-28T22:30", "UTC", False),
        ({"days": ["fri"], "hours": ["22:00-06:00"]}, "2026-11-27T05:00", "UTC", False),
        # Summer and winter time: 08:00 in Berlin is 06:00 and 07:00 UTC.
        ({"hours": ["08:00-09:00"], "timezone": "Europe/Berlin"}, "2026-07-01T06:30", "UTC", True),
        ({"hours": ["08:00-09:00"], "timezone": "Europe/Berlin"}, "2026-12-01T06:30", "UTC", False),
        ({"hours": ["08:00-09:00"], "timezone": "Europe/Berlin"}, "2026-12-01T07:30", "UTC", True),
    ],
)
def test_days_and_hours(schedule: dict, moment: str, zone: str, asked: bool) -> None:
    assert ScheduleConfig(**schedule).holds(at(moment, zone)) is asked


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"hours": ["8-18"]}, "hours are written like"),
        ({"hours": ["08:00-25:00"]}, "hours are written like"),
        ({"hours": ["08:00-08:00"]}, "start and end at the same time"),
        ({"timezone": "Mars/Olympus"}, "there is no time zone 'Mars/Olympus'"),
        ({"timezone": "../../etc/passwd"}, "there is no time zone"),
        ({"days": []}, "days"),
        ({"days": ["monday"]}, "mon"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule: dict, said: str) -> None:
    question = {"id": "q", "text": "Is anyone there?", "when": schedule}
    with pytest.raises(ConfigError, match=said):
        load_config(None, {"cameras": [{"name": "gate", "source": "demo://gate", "questions": [question]}]})
