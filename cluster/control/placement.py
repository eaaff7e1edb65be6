"""Placement of cameras on members (decoders or replicas): consistent hashing with bounded loads.

Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (SODA 2018): no member holds more than ``(1
+ slack)`` times the mean load; a key goes to the first member of its own preference order with free capacity. Here keys
have weights (replica seconds per second), so a member may exceed the bound by less than one key, which for keys of
weight one is the paper's ``ceil((1 + slack) * mean)``. The order is by rendezvous weights instead of a ring, which
needs no virtual nodes.

The table is also sticky, because moving a camera is expensive: a key moves only when its owner leaves or is drained, or
when a change puts its owner above the bound.
"""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

SLACK = 0.25
"""Excess over the mean up to which a member keeps its keys."""

# Loads are sums of floats: smaller differences are rounding errors.
_SAME = 1e-9

EVEN = 0.05
"""Excess over the mean up to which a member takes keys, and to which a full one gives keys to a new member."""


class Placement:
    """The table ``key -> member``, changed only by its owner, the controller.

    Methods that can move keys return the moved ones as ``{key: new member}``, ``None`` if no member is left.
    """

    def __init__(self) -> None:
        self._members: dict[str, set[str]] = {}
        self._owners: dict[str, str | None] = {}
        self._weights: dict[str, float] = {}
        self._hashes: dict[str, int] = {}
        self._total = 0.0
        # One row per member, in the order of ``_names``.
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._loads: npt.NDArray[np.float64] = np.zeros(0)
        self._draining: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._member_hashes: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    @property
    def members(self) -> list[str]:
        return sorted(self._members)

    @property
    def max_over_mean(self) -> float:
        """Largest load / mean load; 0 without any load."""
        mean = self._mean()
        return float(self._loads[~self._draining].max()) / mean if mean else 0.0

    def owner(self, key: str) -> str | None:
        """The member that owns ``key``; ``None`` for an unknown key, or without members."""
        return self._owners.get(key)

    def keys(self, member: str) -> set[str]:
        """Copy of the set of keys that ``member`` owns."""
        return set(self._members.get(member, ()))

    def load(self, member: str) -> float:
        """Total weight of the keys that ``member`` owns."""
        return float(self._loads[self._rows[member]])

    def add(self, key: str, *, weight: float = 1.0, prefer: str | None = None) -> str | None:
        """Place a new key and return its owner. ``prefer``: member that already has it, as a restarted controller
        learns from the members."""
        self._owners[key] = None
        self._weights[key] = _checked(weight)
        self._hashes[key] = _hash(key)
        self._total += weight
        if prefer in self._members and not self.is_draining(prefer):
            self._assign(key, self._rows[prefer])
        else:
            self._place(key)
        return self._owners[key]

    def remove(self, key: str) -> dict[str, str | None]:
        """Remove a known key. The bound falls with it, so others may move."""
        self._unassign(key)
        del self._owners[key], self._hashes[key]
        self._total -= self._weights.pop(key)
        return self._relieve(tight=False)

    def set_weight(self, key: str, weight: float) -> None:
        """Change the weight of a known key, without moving anything."""
        more = _checked(weight) - self._weights[key]
        self._weights[key] = weight
        self._total += more
        owner = self._owners[key]
        if owner is not None:
            self._loads[self._rows[owner]] += more

    def join(self, member: str) -> dict[str, str | None]:
        """Add a member, or one that was drained: it takes keys without an owner, then the excess of members above the
        bound."""
        if member in self._members:
            drained, self._draining[self._rows[member]] = self.is_draining(member), False
            return self._relieve(tight=True) if drained else {}
        self._members[member] = set()
        self._rows[member] = len(self._names)
        self._names.append(member)
        self._loads = np.append(self._loads, 0.0)
        self._draining = np.append(self._draining, False)
        self._member_hashes = np.append(self._member_hashes, np.uint64(_hash(member)))
        self._total = math.fsum(self._weights.values())
        moved = self._place_all(key for key, owner in self._owners.items() if owner is None)
        return moved | self._relieve(tight=True)

    def leave(self, member: str) -> dict[str, str | None]:
        """Remove a known member; only its own keys move. If all remaining ones are drained, they take keys again."""
        orphans = self._members.pop(member)
        row = self._rows.pop(member)
        del self._names[row]
        self._rows = {name: place for place, name in enumerate(self._names)}
        self._loads, self._draining = np.delete(self._loads, row), np.delete(self._draining, row)
        self._member_hashes = np.delete(self._member_hashes, row)
        if self._draining.all():
            self._draining[:] = False
        for key in orphans:
            self._owners[key] = None
        return self._place_all(orphans)

    def is_draining(self, member: str) -> bool:
        """Whether a member takes no keys."""
        row = self._rows.get(member)
        return row is not None and bool(self._draining[row])

    def drain(self, member: str) -> dict[str, str | None]:
        """Move all keys off a live member, which takes no more until it leaves or joins again. The last member that is
        not drained keeps its keys."""
        if not self.can_drain(member):
            return {}
        self._draining[self._rows[member]] = True
        keys = self.keys(member)
        for key in keys:
            self._unassign(key)
        return self._place_all(keys)

    def can_drain(self, member: str) -> bool:
        """Whether another member would take the keys of a known one."""
        return bool((~np.delete(self._draining, self._rows[member])).any())

    # -- one key ---------------------------------------------------------------------------------
    def _place_all(self, keys: Iterable[str]) -> dict[str, str | None]:
        """Place keys, heaviest first, so that light ones fill the gaps."""
        moved: dict[str, str | None] = {}
        for key in sorted(keys, key=lambda key: (-self._weights[key], key)):
            self._place(key)
            moved[key] = self._owners[key]
        return moved

    def _place(self, key: str) -> None:
        """Place one key. Some member always has room: if each held more than ``mean + weight · (1 - 1 / n)`` minus the
        key's weight, together they would hold more than everything but the key."""
        if self._draining.all():
            return
        weight = self._weights[key]
        after = self._loads + weight
        open_to = (after <= self._limit(weight) + _SAME * (1 + self._total)) & ~self._draining
        liking = _mix(self._member_hashes ^ np.uint64(self._hashes[key]))
        if open_to.any():
            liking[~open_to] = 0
            self._assign(key, int(liking.argmax()))
        else:
            # Reached only through rounding errors that accumulated in the total.
            self._assign(key, int(np.where(self._draining, np.inf, self._loads).argmin()))

    def _limit(self, weight: float) -> float:
        """Maximum load of a member after taking a key of ``weight``. Tighter than the bound for keeping keys: of two
        cameras each of two decoders gets one, but neither moves when others are removed."""
        mean = self._mean()
        return max((1 + EVEN) * mean, mean + weight * (1 - 1 / self._active))

    def _mean(self) -> float:
        """Mean load of the members that are not drained."""
        return self._total / self._active if self._active else 0.0

    @property
    def _active(self) -> int:
        return int(np.count_nonzero(~self._draining))

    def _assign(self, key: str, row: int) -> None:
        name = self._names[row]
        self._owners[key] = name
        self._members[name].add(key)
        self._loads[row] += self._weights[key]

    def _unassign(self, key: str) -> None:
        owner = self._owners[key]
        if owner is None:
            return
        row = self._rows[owner]
        self._members[owner].discard(key)
        self._owners[key] = None
        self._loads[row] = self._loads[row] - self._weights[key] if self._members[owner] else 0.0

    # -- many keys -------------------------------------------------------------------------------
    def _relieve(self, *, tight: bool) -> dict[str, str | None]:
        """Move keys off every member above its bound, starting with those that rank their owner lowest; ``tight``: down
        to the limit for taking keys, else to that for keeping them."""
        if self._draining.all():
            return {}
        moved: dict[str, str | None] = {}
        # Only these can be above either bound.
        bound = (1 + SLACK) * self._mean()
        rows = np.flatnonzero((self._loads > bound + _SAME * (1 + self._total)) & ~self._draining)
        for name in sorted(self._names[row] for row in rows):
            leaving = self._excess(name, bound, tight)
            for key in leaving:
                self._unassign(key)
            moved.update(self._place_all(leaving))
        return moved

    def _excess(self, member: str, bound: float, tight: bool) -> list[str]:
        keys, row = self._members[member], self._rows[member]
        heaviest = max(self._weights[key] for key in keys)
        same = _SAME * (1 + self._total)
        # A load of a whole key or more above the bound must shrink, less may stay.
        limit = self._limit(heaviest) + same if tight else bound + heaviest - same
        load, leaving = self.load(member), []
        if load <= limit:
            return []
        ordered = sorted(keys)
        liking = _mix(np.array([self._hashes[key] for key in ordered], dtype=np.uint64) ^ self._member_hashes[row])
        for place in np.argsort(liking, kind="stable"):
            leaving.append(ordered[place])
            load -= self._weights[ordered[place]]
            if load <= limit:
                break
        return leaving


def _checked(weight: float) -> float:
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"a key's weight must be a number of at least 0, not {weight}")
    return weight


def _hash(name: str) -> int:
    """64-bit hash, equal in every process, unlike Python's ``hash``."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Rendezvous weights: the finaliser of splitmix64, over ``key ^ member``."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
