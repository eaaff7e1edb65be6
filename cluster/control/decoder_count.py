"""How many decoders a cluster runs: between two numbers, by how busy they are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from cluster import metrics
from cluster.config import ClusterConfig
from cluster.types.reports import DecoderNumbers

log = logging.getLogger(__name__)

HIGH, LOW = 0.75, 0.5
"""Mean busy share above which a decoder is added, and the one the others may have at most without it."""

CALM_HOLDS = 4
"""Load is followed after one hold, quiet after so many: to decode too little costs windows, too much only a core."""


@dataclass(slots=True)
class DecoderCount:
    """Call :meth:`decide` about once a second; seconds of any clock.

    One decoder is added or removed at a time, and the next step waits for a hold of its own. While one is missing (it
    starts, or no node has room for it), shares say nothing, and nothing changes.

    Args:
        least, most: decoders.
        hold_s: seconds for which the load must last.
        count: how many are wanted.
    """

    least: int
    most: int
    hold_s: float
    count: int = 0
    _over_s: float | None = None
    _under_s: float | None = None

    def __post_init__(self) -> None:
        self.count = min(max(self.count, self.least), self.most)

    @classmethod
    def configured(cls, config: ClusterConfig, count: int) -> DecoderCount:
        """As the configuration says; ``count``: wanted before this controller, 0 if none was."""
        return cls(config.decoders, config.max_decoders or config.decoders, config.decoders_hold_s, count)

    @property
    def names(self) -> list[str]:
        """Of the wanted decoders."""
        return decoder_names(self.count)

    def numbers(self, running: int) -> DecoderNumbers | None:
        """For operators; ``None`` where the number is fixed."""
        return DecoderNumbers(running, self.count, self.least, self.most) if self.most > self.least else None

    def decide(self, busy: Mapping[str, float], now_s: float) -> bool:
        """Decide by the busy share of each decoder that is there; whether another number is wanted from now on."""
        shares = [busy[name] for name in self.names if name in busy]
        mean = fmean(shares) if len(shares) == self.count else 0.0
        over = len(shares) == self.count < self.most and mean > HIGH
        under = len(shares) == self.count > self.least and mean * self.count < LOW * (self.count - 1)
        self._over_s = (now_s if self._over_s is None else self._over_s) if over else None
        self._under_s = (now_s if self._under_s is None else self._under_s) if under else None
        if self._over_s is not None and now_s - self._over_s >= self.hold_s:
            return self._step(1, mean)
        if self._under_s is not None and now_s - self._under_s >= CALM_HOLDS * self.hold_s:
            return self._step(-1, mean)
        return False

    def _step(self, by: int, mean: float) -> bool:
        log.info("%d decoders instead of %d: they are busy for %.0f %%", self.count + by, self.count, 100 * mean)
        self.count += by
        self._over_s = self._under_s = None
        metrics.fleet_wanted.labels("decoder").set(self.count)
        return True


def decoder_names(count: int) -> list[str]:
    """Names of so many decoders."""
    return [f"decoder-{number}" for number in range(count)]
