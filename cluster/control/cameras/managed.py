"""Declared cameras, the managers who alone may change them, and the changes between two declarations."""

import json
import re
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from cluster.config.camera import CameraEntry
from cluster.config.problems import Section
from cluster.errors import ConfigError, ManagedElsewhereError
from cluster.redaction import REVEAL, SourceAddress
from cluster.redaction.address import HIDDEN

CONFIGURATION = "configuration"
CLUSTER = "cluster"
KUBERNETES = "kubernetes"
FILE = "file"

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,62}")
_WHOSE = {
    CONFIGURATION: "is written in the cluster's configuration",
    CLUSTER: "was added over the command line or the API",
    KUBERNETES: "belongs to its Camera resource in Kubernetes",
}


def manager_from_outside(name: str) -> str:
    """Validate a manager name from the network; empty means ``cluster``. Raises ``ConfigError``: an invalid or reserved
    name."""
    if name in (CONFIGURATION, KUBERNETES):
        raise ConfigError(f"a manager must not be called {name!r}, which is reserved for the cluster itself")
    if name and not _NAME.fullmatch(name):
        raise ConfigError(f"a manager's name is up to 63 letters, digits, _ . and -, not {name[:80]!r}")
    return name or CLUSTER


def check_manager(camera: str, owner: str, asking: str, *, takeover: bool = False) -> None:
    """Check that the manager ``asking`` may change a camera of ``owner``. Raises ``ManagedElsewhereError``: it belongs
    to another manager, without ``takeover``."""
    if owner != asking and not takeover:
        whose = _WHOSE.get(owner, f"belongs to the files that were applied as {owner!r}")
        raise ManagedElsewhereError(f"camera {camera!r} {whose}; change it there, or take it over (--takeover)")


class ManagedCamera(Section):
    """The controller's persistent record of a camera, unresolved."""

    entry: CameraEntry = Field(description="The keys that were given.")
    manager: str = Field(default=CLUSTER, description="Who alone may change the camera.")
    uid: str = Field(default="", description="UID of its Kubernetes object; another UID means another camera.")
    life: str = Field(default="", description="Id assigned when added; a camera added again gets another one.")
    revision: str = Field(
        default="", description="Id assigned at every change; in an update, the revision that was read."
    )
    trouble: str = Field(default="", exclude=True, description="Why the stored entry is left out; empty if it is used.")

    def to_json(self) -> str:
        """Inverse of ``ManagedCamera.model_validate_json``, with secrets; unset keys stay unset."""
        return self.model_dump_json(exclude_unset=True, context=dict(REVEAL))


def unique_id() -> str:
    """Random id, for lives and revisions of cameras."""
    return uuid.uuid4().hex[:16]


def written_keys(entry: CameraEntry) -> dict[str, Any]:
    """The keys that were given for a camera, as plain values, and the source as a :class:`SourceAddress`."""
    body: dict[str, Any] = entry.model_dump(mode="json", exclude_unset=True)
    if "source" in body:
        body["source"] = entry.source or None
    return {key: value for key, value in body.items() if value is not None}


def settings_of(entry: CameraEntry) -> dict[str, Any]:
    """Settings argument of ``Cameras.Add`` and ``Cameras.Update``: all keys but name and source."""
    return {key: value for key, value in written_keys(entry).items() if key not in ("name", "source")}


def entry_to_json(entry: CameraEntry, *, secrets: bool) -> str:
    """:func:`written_keys` as JSON; the source is unmasked only with ``secrets``."""
    return json.dumps(written_keys(entry), default=SourceAddress.reveal if secrets else str)


def entry_from_json(text: str) -> CameraEntry:
    """The inverse of :func:`entry_to_json`."""
    return CameraEntry.model_validate(json.loads(text))


def with_variables(entry: dict[str, Any], taken: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Replace each masked secret of an exported camera by a variable reference; returns the entry and the variables'
    names. ``taken``: names used by other cameras."""
    first, *others = str(entry.get("source", "")).split(HIDDEN)
    if not others:
        return entry, []
    plain = re.sub(r"\W", "_", entry["name"]).upper() + "_PASSWORD"
    plain = plain if not plain[0].isdigit() else f"CAMERA_{plain}"
    variables: list[str] = []
    source = first
    for other in others:
        variable, number = plain, 2
        # Two lookups, since copying `taken` for each of thousands of cameras is slow.
        while variable in taken or variable in variables:
            variable, number = f"{plain}_{number}", number + 1
        variables.append(variable)
        source += f"${{{variable}}}{other}"
    return {**entry, "source": source}, variables


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one camera. ``conflict``: ``owner`` has it and keeps it; ``takeover``: it is taken from ``owner``."""

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
    """Changes from the cluster's ``present`` cameras to those that ``manager`` wants, sorted by name. ``prune``: remove
    this manager's other cameras; ``takeover``: take wanted cameras over from other managers."""
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
    """``cameras``: the new table; ``changed``: new or changed cameras; ``left``: declared, but owned by others."""

    cameras: list[ManagedCamera]
    changed: list[ManagedCamera]
    removed: list[ManagedCamera]
    left: list[str]


def merge_configuration(
    last: Sequence[CameraEntry], now: Sequence[CameraEntry], cameras: Sequence[ManagedCamera]
) -> CameraChanges:
    """Apply the difference between the ``last`` configuration's cameras and those of ``now`` to the ``cameras`` it
    manages. Unchanged entries change nothing, so that cameras removed or taken over at run time stay so."""
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
        life = camera.life if camera is not None else unique_id()
        known[entry.name] = ManagedCamera(entry=entry, manager=CONFIGURATION, life=life, revision=unique_id())
        changed.append(known[entry.name])
    removed = [known[name] for name in sorted(before) if name in known and known[name].manager == CONFIGURATION]
    for camera in removed:
        del known[camera.entry.name]
    return CameraChanges(list(known.values()), changed, removed, left)


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        parts = [_flat(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()]
        return {name: inner for part in parts for name, inner in part.items()}
    if isinstance(value, list) and value and all(isinstance(each, Mapping) and "id" in each for each in value):
        return _flat({each["id"]: {k: v for k, v in each.items() if k != "id"} for each in value}, key)
    return {key: value}
