"""Which member (decoder or replica) owns which camera: consistent hashing with bounded loads.

Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (SODA 2018): no member holds more than
``ceil((1 + slack) * mean)`` keys; a key goes to the first member of its own preference order that has room.
The order is by rendezvous weights instead of a ring, which needs no virtual nodes and costs one hash per member.

The table is sticky on top of that, because moving a camera throws its window away: a key moves only when its owner
leaves, or when a change has put its owner above the bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable


class Placement:
    """The table ``key -> member``; one owner (the controller) changes it, and every change says what moved.

    Every method that can move keys returns the moved ones as ``{key: new member}``, ``None`` when nobody is left.
    """

    def __init__(self, *, slack: float = 0.25) -> None:
        if slack < 0:
            raise ValueError(f"slack must not be negative, not {slack}")
        self.slack = slack
        self._members: dict[str, set[str]] = {}
        self._owners: dict[str, str | None] = {}

    @property
    def members(self) -> list[str]:
        return sorted(self._members)

    @property
    def bound(self) -> int:
        """The most keys a member may own now; 0 without members."""
        if not self._members:
            return 0
        return math.ceil((1 + self.slack) * len(self._owners) / len(self._members))

    def owner(self, key: str) -> str | None:
        """The member that owns ``key``; ``None`` for an unknown key, or when there is no member."""
        return self._owners.get(key)

    def keys(self, member: str) -> set[str]:
        """A copy of the keys ``member`` owns."""
        return set(self._members.get(member, ()))

    def add(self, key: str, *, prefer: str | None = None) -> str | None:
        """Place a new key (a known one stays where it is) and return its owner.

        ``prefer``: the member that has it already, as a restarted controller learns from the members themselves.
        """
        if key not in self._owners:
            self._owners[key] = None
            if prefer is not None and prefer in self._members:
                self._give(key, prefer)
            else:
                self._place(key)
        return self._owners[key]

    def remove(self, key: str) -> dict[str, str | None]:
        """Forget a key. The bound may fall with it, so others may move."""
        owner = self._owners.pop(key, None)
        if owner is not None:
            self._members[owner].discard(key)
        return self._relieve(self.bound)

    def join(self, member: str) -> dict[str, str | None]:
        """Let a member in: it takes the keys nobody owned, then what the others have above their share."""
        if member in self._members:
            return {}
        self._members[member] = set()
        moved = self._place_all(sorted(key for key, owner in self._owners.items() if owner is None))
        return moved | self._relieve(self._room())

    def leave(self, member: str) -> dict[str, str | None]:
        """Take a member out; only its own keys move."""
        orphans = sorted(self._members.pop(member, ()))
        for key in orphans:
            self._owners[key] = None
        return self._place_all(orphans)

    def _place_all(self, keys: Iterable[str]) -> dict[str, str | None]:
        moved: dict[str, str | None] = {}
        for key in keys:
            self._place(key)
            moved[key] = self._owners[key]
        return moved

    def _place(self, key: str) -> None:
        bound = self._room()
        for member in self._preferences(key):
            if len(self._members[member]) < bound:
                self._give(key, member)
                return

    def _give(self, key: str, member: str) -> None:
        self._owners[key] = member
        self._members[member].add(key)

    def _room(self) -> int:
        """The bound for members that take keys. Tighter than what may stay: of two cameras each decoder gets one, but
        neither moves when others are removed."""
        if not self._members:
            return 0
        mean = len(self._owners) / len(self._members)
        return max(math.ceil(mean), math.floor((1 + self.slack) * mean))

    def _relieve(self, bound: int) -> dict[str, str | None]:
        """Move keys off every member above ``bound``, those first that like their owner least."""
        moved: dict[str, str | None] = {}
        for member in self.members:
            excess = len(self._members[member]) - bound
            if excess <= 0:
                continue
            leaving = sorted(self._members[member], key=lambda key: _weight(key, member))[:excess]
            for key in leaving:
                self._members[member].discard(key)
                self._owners[key] = None
            moved.update(self._place_all(leaving))
        return moved

    def _preferences(self, key: str) -> list[str]:
        return sorted(self._members, key=lambda member: _weight(key, member), reverse=True)


def _weight(key: str, member: str) -> bytes:
    """Rendezvous weight; the same in every process, which Python's own ``hash`` is not."""
    return hashlib.blake2b(f"{key}\0{member}".encode(errors="surrogatepass"), digest_size=8).digest()
