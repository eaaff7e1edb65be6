"""Limits on a principal's call rate and concurrency, and on resources held by unauthenticated callers."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from cluster.errors import CapacityError, RateLimitError
from cluster.security.roles import ANYBODY, current_principal

T = TypeVar("T")

KEPT = 4096
"""Maximum principals whose rate is remembered; the least recent caller is evicted first."""


class RateLimit:
    """Token bucket of ``burst`` calls per principal, refilled at ``per_s`` calls a second."""

    def __init__(self, per_s: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst = per_s, burst
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def acquire(self, principal: str, cost: float = 1.0) -> None:
        """Take ``cost`` calls, at most a burst, from the bucket. Raises ``RateLimitError``."""
        with self._lock:
            now = self._clock()
            left, since = self._buckets.pop(principal, (float(self._burst), now))
            cost = min(cost, self._burst)
            left = min(self._burst, left + max(0.0, now - since) * self._per_s)
            early = max(0.0, cost - left) / self._per_s
            self._buckets[principal] = (left if early else left - cost, now)
            if len(self._buckets) > KEPT:
                self._buckets.popitem(last=False)
        if early:
            raise RateLimitError(f"{principal!r} calls too often; try again in {early:.1f} s")

    def charge(self, principal: str, cost: float) -> None:
        """Charge an extra ``cost`` to a call in progress, at the expense of later ones."""
        with self._lock:
            left, since = self._buckets.get(principal, (float(self._burst), self._clock()))
            self._buckets[principal] = (left - cost, since)


class ConcurrencyLimit:
    """At most ``most`` of ``what`` at once, and half of that per principal, so that no token locks others out. For one
    event loop."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._held: list[str] = []

    def refusal(self) -> str:
        """Why the current principal gets no place now: all, or its share, are taken; empty if it gets one."""
        who = current_principal()
        own = self._most if who is ANYBODY else (self._most + 1) // 2
        full = len(self._held) >= self._most or self._held.count(who.name) >= own
        return f"{min(len(self._held), own)} {self._what}" if full else ""

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold a place for the current principal. Raises ``CapacityError`` with the :meth:`refusal`."""
        if refusal := self.refusal():
            raise CapacityError(refusal)
        who = current_principal().name
        self._held.append(who)
        try:
            yield
        finally:
            self._held.remove(who)


class AnonymousPool(Generic[T]):
    """At most ``limit`` items of callers without a token. A further item evicts the oldest of the peer that holds the
    most, so that a flooding peer evicts its own. For one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[T, str] = {}

    def __contains__(self, item: object) -> bool:
        return item in self._held

    def add(self, item: T, peer: str) -> T | None:
        evicted = None
        if len(self._held) >= self._limit:
            most, _ = Counter(self._held.values()).most_common(1)[0]
            evicted = next(each for each, whose in self._held.items() if whose == most)
            del self._held[evicted]
        self._held[item] = peer
        return evicted

    def discard(self, item: T) -> None:
        """Remove an item that has ended, or whose caller has authenticated."""
        self._held.pop(item, None)
