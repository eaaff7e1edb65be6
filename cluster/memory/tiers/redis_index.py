"""What one stream has in Redis, as far as its owner knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A value that counts as ``size`` bytes, whose time to live began at ``renewed``."""

    size: int
    renewed: float


@dataclass(slots=True, eq=False)
class StreamIndex:
    """Mirrors the stream's hash of sizes on the server. ``known``: it has been read, and no write is in doubt since.

    ``entries``: by field (``layer:head:cluster``, ``manifest``), the longest not renewed first. ``gone``: fields whose
    value turned out to be missing or damaged, to be swept by the next write. Not thread-safe.
    """

    known: bool = False
    total: int = 0
    entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    gone: set[str] = field(default_factory=set)

    def put(self, name: str, size: int, now: float) -> None:
        self.remove([name])
        self.entries[name] = Entry(size, now)
        self.total += size

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            there = self.entries.pop(name, None)
            self.total -= there.size if there is not None else 0

    def size(self, name: str) -> int:
        """Bytes of the value, 0 if there is none."""
        there = self.entries.get(name)
        return 0 if there is None else there.size

    def replace(self, found: Mapping[bytes, bytes]) -> None:
        """Take over what the server's hash says; the age of everything is unknown, so all is due."""
        self.entries = OrderedDict((name.decode(), Entry(int(size), 0.0)) for name, size in found.items())
        self.total = sum(entry.size for entry in self.entries.values())
        self.gone.clear()
        self.known = True

    def missing(self, name: str, seen: Entry | None) -> None:
        """The value was not there, or was no good, when the entry was ``seen``."""
        if seen is not None and self.entries.get(name) is seen:
            self.remove([name])
            self.gone.add(name)

    def swept(self) -> list[str]:
        """The fields to delete, and forget them; not those written again since."""
        names = [name for name in self.gone if name not in self.entries]
        self.gone.clear()
        return names

    def due(self, before: float, limit: int) -> list[str]:
        """Fields not renewed since ``before``."""
        names: list[str] = []
        for name, entry in self.entries.items():
            if entry.renewed >= before or len(names) == limit:
                break
            names.append(name)
        return names
