"""Autoscaling of decoders by their busy share, and the table of decoders with the cameras placed on each."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from cluster import metrics
from cluster.config import ClusterConfig
from cluster.control.camera_record import Member
from cluster.control.placement import Placement
from cluster.types.reports import DecoderInfo, DecoderNumbers

log = logging.getLogger(__name__)

HIGH, LOW = 0.75, 0.5
"""Mean busy share above which a decoder is added, and below which the others must stay for one to be removed."""

CALM_HOLDS = 4
"""Holds of low load before a decoder is removed, one before one is added: too few decoders cost windows, too many only
cores."""


@dataclass(slots=True)
class DecoderCount:
    """Wanted number of decoders, ``count``; call :meth:`decide` about once a second, with any clock.

    One decoder is added or removed at a time, each after a hold of its own. While one is missing (it is starting, or no
    node has room for it), shares are meaningless and nothing changes. ``hold_s``: how long load must last, in seconds.
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
        """Create from the configuration; ``count``: number wanted by an earlier controller, 0 if there was none."""
        return cls(config.decoders, config.max_decoders or config.decoders, config.decoders_hold_s, count)

    @property
    def names(self) -> list[str]:
        return decoder_names(self.count)

    def numbers(self, running: int) -> DecoderNumbers | None:
        """Numbers for operators; ``None`` if the number is fixed."""
        return DecoderNumbers(running, self.count, self.least, self.most) if self.most > self.least else None

    def decide(self, busy: Mapping[str, float], now_s: float) -> bool:
        """Update ``count`` from the busy share of each live decoder; returns whether it changed."""
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
        log.info("%d decoders instead of %d, which were %.0f %% busy", self.count + by, self.count, 100 * mean)
        self.count += by
        self._over_s = self._under_s = None
        metrics.fleet_wanted.labels("decoder").set(self.count)
        return True


def decoder_names(count: int) -> list[str]:
    """Names of ``count`` decoders."""
    return [f"decoder-{number}" for number in range(count)]


class DecoderTable:
    """Decoders and their cameras; part of the controller's :class:`~cluster.control.directory.Directory`."""

    def __init__(self) -> None:
        self.members: dict[str, Member[DecoderInfo]] = {}
        self._placed = Placement()
        self._running_on: dict[str, str] = {}

    def add(self, camera: str) -> None:
        """Place a camera; a decoder that was running it when it joined keeps it."""
        self._placed.add(camera, prefer=self._running_on.pop(camera, None))

    def remove(self, camera: str) -> bool:
        """Remove a camera; returns whether others moved."""
        return bool(self._placed.remove(camera))

    def owner(self, camera: str) -> str | None:
        return self._placed.owner(camera)

    def cameras(self, name: str) -> set[str]:
        return self._placed.keys(name)

    def address(self, name: str | None) -> str | None:
        """``host:port`` of a decoder; ``None`` if unknown."""
        return self.members[name].info.address if name in self.members else None

    def join(self, info: DecoderInfo, now_s: float, running: Iterable[str]) -> None:
        """Add a decoder that started, or met a new controller while ``running`` cameras that are not yet placed."""
        self._running_on.update((camera, info.name) for camera in running)
        self.members[info.name] = Member(info, now_s)
        self._placed.join(info.name)

    def leave(self, name: str) -> None:
        """Remove a decoder; others take its cameras."""
        del self.members[name]
        self._placed.leave(name)

    def heartbeat(self, name: str, instance: str, now_s: float, *, busy: float, running: bool) -> bool:
        """Record a heartbeat; false if the decoder is unknown. ``running``: it reported cameras."""
        member = self.members.get(name)
        if member is None or member.info.instance != instance:
            return False
        member.seen_s, member.busy = now_s, busy
        member.empty = not running and self._placed.is_draining(name)
        return True

    def late(self, since_s: float) -> list[str]:
        """Decoders without a heartbeat since ``since_s``."""
        return [name for name, member in self.members.items() if member.seen_s < since_s]

    def keep(self, names: Collection[str]) -> bool:
        """Drain all decoders but these, which take cameras again; returns whether anything changed."""
        placed = self._placed
        back = [name for name in names if placed.is_draining(name)]
        leaving = [name for name in self.members if name not in names and not placed.is_draining(name)]
        leaving = [name for name in leaving if placed.can_drain(name)]
        for name in back:
            placed.join(name)
        for name in leaving:
            placed.drain(name)
        for name in (*back, *leaving):
            # Its last heartbeat predates the change.
            self.members[name].empty = False
        return bool(back or leaving)

    @property
    def loads(self) -> dict[str, float]:
        """Busy share of each decoder, without drained ones that have no camera left."""
        return {name: member.busy for name, member in self.members.items() if not member.empty}
