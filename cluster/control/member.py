"""A decoder or a replica in the controller's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.types.reports import DecoderInfo, ReplicaInfo, ReplicaReport

Info = TypeVar("Info", DecoderInfo, ReplicaInfo)


@dataclass(slots=True)
class Member(Generic[Info]):
    """One that is alive as far as we know. ``seen_s``: when it was last heard of; ``load``: a replica's last."""

    info: Info
    seen_s: float
    load: ReplicaReport | None = None

    def since(self, load: ReplicaReport, now_s: float) -> tuple[float, int, int] | None:
        """Share of the time it was busy since it was last heard of, its engine's steps since then, and the windows
        computed in them; ``None`` where nothing is known of before."""
        if self.load is None or now_s <= self.seen_s:
            return None
        busy_share = (load.busy_s - self.load.busy_s) / (now_s - self.seen_s)
        return busy_share, load.steps - self.load.steps, load.windows - self.load.windows
