"""``when:`` of a question — the days and hours in which it is asked."""

import re
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Annotated, Literal, TypeAlias
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field

from cluster.config.problems import Section

Day: TypeAlias = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-(?:([01]\d|2[0-3]):([0-5]\d)|(24):(00))")


def _minutes(text: str) -> tuple[int, int]:
    """Minutes since midnight of ``HH:MM-HH:MM``, begin and end.

    Raises:
        ValueError: it is none, or both are the same.
    """
    found = _HOURS.fullmatch(text)
    if found is None:
        raise ValueError(f"hours are written like 08:00-18:30 or 22:00-06:00, not {text[:40]!r}")
    hour, minute, *end = [int(each) for each in found.groups() if each is not None]
    begin, until = 60 * hour + minute, 60 * end[0] + end[1]
    if begin == until:
        raise ValueError(f"hours {text} begin and end at the same time; leave them away to ask all day")
    return begin, until


def _check_hours(text: str) -> str:
    _minutes(text)
    return text


def _check_zone(name: str) -> str:
    try:
        _zone(name)
    except (OSError, ValueError, KeyError):
        raise ValueError(f"there is no time zone {name[:80]!r}; name one like UTC or Europe/Berlin") from None
    return name


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


Hours: TypeAlias = Annotated[str, AfterValidator(_check_hours)]


class ScheduleConfig(Section):
    """Local days and hours; hours that cross midnight belong to the day on which they begin."""

    days: list[Day] = Field(default_factory=lambda: list(DAYS), min_length=1)
    """Days of the week."""
    hours: list[Hours] = Field(default_factory=list, max_length=16)
    """Hours of these days, each like 08:00-18:30 or, over midnight, 22:00-06:00; empty: all day."""
    timezone: Annotated[str, AfterValidator(_check_zone)] = Field(default="UTC", max_length=64)
    """Time zone of days and hours, like Europe/Berlin."""

    def holds(self, at_s: float) -> bool:
        """Whether ``at_s``, seconds since 1970, is within it."""
        now = datetime.fromtimestamp(at_s, _zone(self.timezone))
        minute = 60 * now.hour + now.minute
        today, yesterday = DAYS[now.weekday()], DAYS[(now.date() - timedelta(days=1)).weekday()]
        if not self.hours:
            return today in self.days
        for begin, end in map(_minutes, self.hours):
            crosses = end < begin
            if today in self.days and minute >= begin and (crosses or minute < end):
                return True
            if crosses and yesterday in self.days and minute < end:
                return True
        return False
