"""The controller's view: who is there, and how full each replica is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from cluster.metrics.families import (
    camera_expected,
    fleet_cameras,
    fleet_lowered,
    fleet_members,
    fleet_utilisation,
    fleet_wanted,
)

if TYPE_CHECKING:
    from cluster.types.reports import ReplicaStatus


class FleetMetrics:
    """Series of members and replicas; those of a replica that left are gone.

    Args:
        wanted: processes that the configuration asks for, by role.
    """

    def __init__(self, wanted: Mapping[str, int]) -> None:
        self._shown: set[str] = set()
        self._expected: set[str] = set()
        for role, count in wanted.items():
            fleet_wanted.labels(role).set(count)
            fleet_members.labels(role).set(0)

    def members(self, there: Mapping[str, int]) -> None:
        """How many of each role are there."""
        for role, count in there.items():
            fleet_members.labels(role).set(count)

    def expect(self, cameras: Collection[str]) -> None:
        """The cameras there are: what alerts on series that are missing goes by."""
        for camera in self._expected - set(cameras):
            camera_expected.remove(camera)
        for camera in set(cameras) - self._expected:
            camera_expected.labels(camera).set(1)
        self._expected = set(cameras)

    def replicas(self, statuses: Sequence[ReplicaStatus]) -> None:
        """How full each replica is."""
        for status in statuses:
            fleet_utilisation.labels(status.name).set(status.utilisation)
            fleet_cameras.labels(status.name).set(status.cameras)
            fleet_lowered.labels(status.name).set(status.lowered)
        for gone in self._shown - {status.name for status in statuses}:
            for family in (fleet_utilisation, fleet_cameras, fleet_lowered):
                family.remove(gone)
        self._shown = {status.name for status in statuses}
