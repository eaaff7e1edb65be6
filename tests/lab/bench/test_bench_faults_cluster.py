"""How the part `cluster` judges windows; the cluster itself is what `bench faults --part cluster` runs."""

import pytest
from process_faults import FAULTS, Windows


@pytest.mark.parametrize(
    ("due", "seen", "said", "counted", "watched", "fine"),
    [
        (10, 10, 10, 0, True, True),
        (10, 7, 7, 3, True, True),
        # One may be under way, either way.
        (10, 7, 7, 2, True, True),
        (10, 7, 7, 4, True, True),
        # Two windows that nobody mentions, and two that are counted as lost although they were answered.
        (10, 7, 7, 1, True, False),
        (10, 10, 10, 2, True, False),
        # Answered twice, as the cluster says; and answered, but nobody heard of it.
        (10, 10, 20, 0, True, False),
        (10, 0, 10, 0, True, False),
        # Of a gateway that was away nobody could hear.
        (10, 0, 10, 0, False, True),
        (10, 0, 7, 0, False, False),
    ],
)
def test_windows_are_answered_or_counted_once(due, seen, said, counted, watched, fine):
    assert Windows(due, seen, said, counted).balanced(watched=watched) is fine


def test_every_process_is_killed_and_frozen_and_the_cluster_ended():
    roles = {"decoder", "replica", "controller", "gateway", "tier", "alerting"}
    wanted = {f"{action}-{role}" for action in ("kill", "freeze") for role in roles}
    wanted |= {
        "kill-decoders-replicas",
        "re-add",
        "redis-gone",
        "disk-full",
        "kill-raylet",
        "kill-dashboard-agent",
        "kill-runtime-env-agent",
    }
    assert set(FAULTS) == wanted
