"""One mechanism, many policies: a named registry per kind of policy.

A policy is one file that ends in ``@pruners.register("name")``; the package's ``__init__`` imports its
siblings, and the shared test matrix iterates over ``names()``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from cluster.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names -> factories of one kind (``kind`` appears in error messages: "pruner", "refresh policy")."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files its object under ``name``; a name taken twice is a programming error."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise RuntimeError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry called ``name``.

        Raises:
            ConfigError: no such entry; the message lists what there is and the nearest name.
        """
        try:
            return self._entries[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            known = ", ".join(sorted(self._entries))
            raise ConfigError(f"unknown {self.kind} {name!r}{hint}; there are: {known}") from None

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._entries
