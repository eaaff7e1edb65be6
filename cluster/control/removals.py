"""Cameras that were removed, until every replica has said that it forgot them: plain Python, driven by calls.

What a camera saw lies with its replica, in its node's tier and perhaps in Redis, and the replica may be down while the
camera is removed. So the order to forget stays until as many replicas as there should be have carried it out; one that
starts is given it before it takes any camera. A camera of the same name may be added meanwhile: a replica that comes
back late then forgets its beginning too, which is better than telling what the removed one saw.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

ORDERS = 256
"""Most cameras that one heartbeat tells a replica to forget; the next one tells of more."""


class Removals:
    """Who must still forget what.

    Args:
        replicas: how many there should be; while fewer are alive, one that is down may hold something.
        pending: cameras whose removal was begun before this process started.
        limit: most removals that wait, and most that are remembered after they were carried out.
    """

    def __init__(self, replicas: int, pending: Iterable[str] = (), *, limit: int = 4096) -> None:
        self._replicas, self._limit = replicas, limit
        self._pending: OrderedDict[str, set[str]] = OrderedDict((camera, set()) for camera in pending)
        # For replicas that were sent frames of such a camera once more, by a decoder that learnt of it late.
        self._done: OrderedDict[str, None] = OrderedDict()

    @property
    def pending(self) -> list[str]:
        """Cameras that not every replica has forgotten, the longest removed first."""
        return list(self._pending)

    def add(self, camera: str) -> list[str]:
        """A camera was removed, perhaps again. Returns those whose order is given up, because too many wait."""
        self._done.pop(camera, None)
        self._pending[camera] = set()
        self._pending.move_to_end(camera)
        return [self._pending.popitem(last=False)[0] for _ in range(len(self._pending) - self._limit)]

    def orders(self, instance: str, reported: Iterable[str] = (), cameras: Collection[str] = ()) -> list[str]:
        """What a replica must forget now: what it has not said it forgot, and what it ``reported`` although it was
        removed and is not among the ``cameras`` there are."""
        removed = [camera for camera, forgot in self._pending.items() if instance not in forgot]
        again = [
            camera for camera in reported if camera not in cameras and (camera in self._pending or camera in self._done)
        ]
        return list(dict.fromkeys([*removed, *again]))[:ORDERS]

    def forgotten(self, instance: str, cameras: Iterable[str], alive: Collection[str]) -> list[str]:
        """A replica has forgotten these in every tier. Returns what is forgotten everywhere now, with the instances of
        the replicas that are ``alive``."""
        for camera in cameras:
            if camera in self._pending:
                self._pending[camera].add(instance)
        if len(alive) < self._replicas:
            return []
        done = [camera for camera, forgot in self._pending.items() if forgot.issuperset(alive)]
        for camera in done:
            del self._pending[camera]
            self._done[camera] = None
        while len(self._done) > self._limit:
            self._done.popitem(last=False)
        return done
