"""Difference between a cluster's cameras and declared ones, and its readable form."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.config.camera import CameraEntry
from cluster.control.cameras.managed import CONFIGURATION, ManagedCamera, written_keys


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one camera. ``conflict``: it belongs to the manager ``owner``, and stays as it is; ``takeover``: it is
    taken from ``owner``."""

    kind: Literal["add", "update", "remove", "same", "conflict", "takeover"]
    name: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    owner: str = ""

    def differences(self) -> list[str]:
        """One line per key, ``window.stride_s: 8 -> 4``; passwords are masked."""
        old, new = _flat(self.before), _flat(self.after)
        found = []
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                shown = [str(values[key]) if key in values else "(not given)" for values in (old, new)]
                found.append(f"{key}: {shown[0]} -> {shown[1]}" if shown[0] != shown[1] else f"{key}: another password")
        return found


def plan(
    wanted: Iterable[CameraEntry],
    present: Iterable[ManagedCamera],
    manager: str,
    *,
    prune: bool = False,
    takeover: bool = False,
) -> list[Change]:
    """Changes by name.

    Args:
        wanted: declared cameras.
        present: the cluster's cameras.
        manager: who declares them.
        prune: remove cameras of this manager that are not wanted.
        takeover: take wanted cameras over from other managers.
    """
    known = {camera.entry.name: camera for camera in present}
    found = []
    for entry in sorted(wanted, key=lambda entry: entry.name):
        camera, after = known.pop(entry.name, None), written_keys(entry)
        before = {} if camera is None else written_keys(camera.entry)
        if camera is None:
            found.append(Change("add", entry.name, before, after))
        elif camera.manager != manager:
            found.append(Change("takeover" if takeover else "conflict", entry.name, before, after, camera.manager))
        else:
            found.append(Change("same" if before == after else "update", entry.name, before, after))
    if prune:
        found += [
            Change("remove", name, written_keys(camera.entry), {})
            for name, camera in sorted(known.items())
            if camera.manager == manager
        ]
    return found


@dataclass(frozen=True, slots=True)
class CameraChanges:
    """``cameras``: the new table; ``changed``: new ones or with other settings; ``left``: declared, but owned by other
    managers."""

    cameras: list[ManagedCamera]
    changed: list[ManagedCamera]
    removed: list[str]
    left: list[str]


def merge_configuration(
    last: Sequence[CameraEntry], now: Sequence[CameraEntry], cameras: Sequence[ManagedCamera]
) -> CameraChanges:
    """Apply the difference between the ``last`` configuration and the one of ``now`` to the cameras it manages.
    Unchanged entries change nothing, so that a camera that was removed or taken over stays so."""
    before = {entry.name: written_keys(entry) for entry in last}
    known = {camera.entry.name: camera for camera in cameras}
    changed, left = [], []
    for entry in now:
        if before.pop(entry.name, None) == written_keys(entry):
            continue
        camera = known.get(entry.name)
        if camera is not None and camera.manager != CONFIGURATION:
            left.append(entry.name)
            continue
        life = camera.life if camera is not None else ""
        known[entry.name] = ManagedCamera(entry=entry, manager=CONFIGURATION, life=life)
        changed.append(known[entry.name])
    removed = [name for name in sorted(before) if name in known and known[name].manager == CONFIGURATION]
    for name in removed:
        del known[name]
    return CameraChanges(list(known.values()), changed, removed, left)


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        parts = [_flat(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()]
        return {name: inner for part in parts for name, inner in part.items()}
    if isinstance(value, list) and value and all(isinstance(each, Mapping) and "id" in each for each in value):
        return _flat({each["id"]: {k: v for k, v in each.items() if k != "id"} for each in value}, key)
    return {key: value}
