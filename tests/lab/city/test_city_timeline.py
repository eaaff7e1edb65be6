"""Events on a simulated city's timeline: how they are written and on whom they fall."""

import numpy as np
import pytest

from cluster.errors import ConfigError
from cluster.lab.city.plan import Event, What, parse_event, split


def test_an_event_is_read():
    assert parse_event("600:kill:3") == Event(600.0, What.KILL, 3.0)
    assert parse_event("12.5:wake:0.8") == Event(12.5, What.WAKE, 0.8)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("600:kill", "SECONDS:WHAT:N"),
        ("600:explode:3", "kill, join, drain, controller, wake"),
        ("soon:kill:3", "must be numbers"),
        ("-1:kill:3", "at least 0"),
        ("nan:kill:3", "at least 0"),
        ("600:kill:0", "at least 1"),
        ("600:drain:1.5", "at least 1"),
        ("600:kill:inf", "at least 1"),
        ("600:join:nan", "at least 1"),
        ("600:wake:nan", "above 0"),
        ("600:wake:1.5", "at most 1"),
        ("600:controller:0", "above 0"),
    ],
)
def test_what_is_no_event_is_refused(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_event(text)


def test_replicas_are_dealt_and_the_rest_falls_on_everyone():
    events = [parse_event(text) for text in ("10:kill:5", "20:join:4", "30:wake:0.5", "40:controller:9")]
    dealt = split(events, [3, 3], np.random.default_rng(0))
    assert sum(e.amount for mine in dealt for e in mine if e.what is What.KILL) == 5
    assert all(e.amount <= 3 for mine in dealt for e in mine if e.what is What.KILL)
    assert sum(e.amount for mine in dealt for e in mine if e.what is What.JOIN) == 4
    assert all([e.what for e in mine][-2:] == [What.WAKE, What.CONTROLLER] for mine in dealt)


def test_no_more_replicas_go_than_there_are():
    with pytest.raises(ConfigError, match="at 20 s 3 replicas are to leave, of 2"):
        split([parse_event("20:drain:3"), parse_event("10:kill:2")], [4], np.random.default_rng(0))
