"""How urgent a camera is: critical before normal before background."""

from __future__ import annotations

from enum import StrEnum

from cluster.errors import ConfigError


class Priority(StrEnum):
    """Classes in the order in which they are served; ``rank`` is 0 for the most urgent."""

    CRITICAL = "critical"
    NORMAL = "normal"
    BACKGROUND = "background"

    rank: int

    @classmethod
    def of(cls, name: str) -> Priority:
        """The class called ``name``.

        Raises:
            ConfigError: there is none of that name.
        """
        try:
            return cls(name)
        except ValueError:
            raise ConfigError(f"unknown priority {name!r}; there are: {', '.join(cls)}") from None


for _rank, _priority in enumerate(Priority):
    # Not a property: every window that waits is asked for it.
    _priority.rank = _rank
