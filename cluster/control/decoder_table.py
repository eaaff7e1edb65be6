"""The decoders that are there, and the cameras placed on each."""

from collections.abc import Collection, Iterable

from cluster.control.camera_record import Member
from cluster.control.placement import Placement
from cluster.types.reports import DecoderInfo


class DecoderTable:
    """Part of the controller's :class:`~cluster.control.directory.Directory`."""

    def __init__(self, slack: float) -> None:
        self.members: dict[str, Member[DecoderInfo]] = {}
        self._placed = Placement(slack=slack)
        self._running_on: dict[str, str] = {}

    def add(self, camera: str) -> None:
        """Place a camera; a decoder that ran it when it joined keeps it."""
        self._placed.add(camera, prefer=self._running_on.pop(camera, None))

    def remove(self, camera: str) -> None:
        self._placed.remove(camera)

    def owner(self, camera: str) -> str | None:
        return self._placed.owner(camera)

    def cameras(self, name: str) -> set[str]:
        """Cameras placed on a decoder."""
        return self._placed.keys(name)

    def address(self, name: str | None) -> str | None:
        """``host:port``; ``None`` for none."""
        return self.members[name].info.address if name in self.members else None

    def join(self, info: DecoderInfo, now_s: float, running: Iterable[str]) -> None:
        """It started, or met a new controller while ``running`` cameras that are not yet placed."""
        self._running_on.update((camera, info.name) for camera in running)
        self.members[info.name] = Member(info, now_s)
        self._placed.join(info.name)

    def leave(self, name: str) -> None:
        """Others take its cameras."""
        del self.members[name]
        self._placed.leave(name)

    def heartbeat(self, name: str, instance: str, now_s: float, *, busy: float, running: bool) -> bool:
        """Record a heartbeat; false where it is unknown. ``running``: it has cameras, or something to say of some."""
        member = self.members.get(name)
        if member is None or member.info.instance != instance:
            return False
        member.seen_s, member.busy = now_s, busy
        member.empty = not running and self._placed.is_draining(name)
        return True

    def late(self, since_s: float) -> list[str]:
        """Those without a heartbeat since then."""
        return [name for name, member in self.members.items() if member.seen_s < since_s]

    def keep(self, names: Collection[str]) -> bool:
        """Move the cameras of all other decoders to these, which take cameras again; whether anything changed."""
        placed = self._placed
        back = [name for name in names if placed.is_draining(name)]
        leaving = [name for name in self.members if name not in names and not placed.is_draining(name)]
        leaving = [name for name in leaving if placed.can_drain(name)]
        for name in back:
            placed.join(name)
        for name in leaving:
            placed.drain(name)
        for name in (*back, *leaving):
            # What it said last was said before.
            self.members[name].empty = False
        return bool(back or leaving)

    @property
    def loads(self) -> dict[str, float]:
        """Busy share of each, without those that are not kept and have no camera any more."""
        return {name: member.busy for name, member in self.members.items() if not member.empty}
