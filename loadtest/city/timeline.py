"""What an operator or bad luck does to a simulated city, and when: ``600:kill:3``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from cluster.errors import ConfigError


class What(StrEnum):
    """Kinds of events."""

    KILL = "kill"
    JOIN = "join"
    DRAIN = "drain"
    CONTROLLER = "controller"
    WAKE = "wake"


MEANING = {
    What.KILL: "N replicas die with all they hold",
    What.JOIN: "N replicas come in",
    What.DRAIN: "N replicas hand their cameras over and leave",
    What.CONTROLLER: "every controller is gone for N seconds and then learns from the replicas what it knew",
    What.WAKE: "a share N of all cameras sees motion for a minute",
}

WAKE_S = 60.0


@dataclass(frozen=True, slots=True)
class Event:
    """``amount``: replicas, seconds or a share, as ``what`` takes."""

    at_s: float
    what: What
    amount: float

    def __str__(self) -> str:
        """As it is written."""
        return f"{self.at_s:g}:{self.what}:{self.amount:g}"


def parse_event(text: str) -> Event:
    """``SECONDS:WHAT:N``.

    Raises:
        ConfigError: anything else.
    """
    parts = text.split(":")
    kinds = ", ".join(What)
    if len(parts) != 3 or parts[1] not in list(What):
        raise ConfigError(f"event {text!r} is not SECONDS:WHAT:N, as in 600:kill:3; WHAT is one of {kinds}")
    try:
        at_s, amount = float(parts[0]), float(parts[2])
    except ValueError:
        raise ConfigError(f"event {text!r}: the time and the amount must be numbers, as in 600:kill:3") from None
    event = Event(at_s, What(parts[1]), amount)
    if not 0 <= at_s < float("inf"):
        raise ConfigError(f"event {text!r}: the time is seconds from the beginning, at least 0")
    whole = event.what in (What.KILL, What.JOIN, What.DRAIN)
    if whole and not (amount >= 1 and amount.is_integer()):
        raise ConfigError(f"event {text!r}: {event.what} takes a number of replicas, at least 1")
    if not 0 < amount < float("inf") or (event.what is What.WAKE and amount > 1):
        raise ConfigError(f"event {text!r}: {MEANING[event.what]}; N must be above 0, and a share at most 1")
    return event


def split(events: Sequence[Event], replicas: Sequence[int], rng: np.random.Generator) -> list[list[Event]]:
    """The events of each district. Deaths, joins and drains fall on districts by how many replicas each has.

    Raises:
        ConfigError: more replicas are to go than there are.
    """
    found: list[list[Event]] = [[] for _ in replicas]
    alive = list(replicas)
    for event in sorted(events, key=lambda each: each.at_s):
        if event.what in (What.CONTROLLER, What.WAKE):
            for mine in found:
                mine.append(event)
            continue
        leaving = event.what is not What.JOIN
        if leaving and event.amount > sum(alive):
            raise ConfigError(
                f"at {event.at_s:g} s {event.amount:g} replicas are to go and only {sum(alive)} are left; name fewer"
            )
        shares = [0] * len(replicas)
        for _ in range(int(event.amount)):
            # One by one, so that no district loses more than it has.
            weights = np.array(alive if leaving else replicas, dtype=float)
            chosen = int(rng.choice(len(replicas), p=weights / weights.sum()))
            shares[chosen] += 1
            alive[chosen] += -1 if leaving else 1
        for index, count in enumerate(shares):
            if count:
                found[index].append(replace(event, amount=float(count)))
    return found
