"""A camera as it was written, and whose it is; its written form as JSON, and without its password."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from cluster.cameras.managers import CLUSTER
from cluster.config.base import Section
from cluster.config.camera import CameraEntry

_PASSWORD = re.compile(r"(?<=://)(?P<user>[^:/@\s]*):(?P<password>[^@/\s]*)@")


class Managed(Section):
    """What the controller keeps of a camera besides its resolved settings, and what outlives its restarts."""

    entry: CameraEntry = Field(description="The keys that were written.")
    manager: str = Field(default=CLUSTER, description="Who alone may change it.")
    uid: str = Field(default="", description="Of the Kubernetes object it was made from; another is another camera.")
    life: str = Field(default="", description="Given when it is added; another when it is removed and added again.")

    def to_json(self) -> str:
        """The inverse of ``Managed.model_validate_json``; keys that were not written stay so."""
        return self.model_dump_json(exclude_unset=True)


def written(entry: CameraEntry) -> dict[str, Any]:
    """The keys of a camera that were given, as plain values."""
    body: dict[str, Any] = entry.model_dump(mode="json", exclude_unset=True)
    return {key: value for key, value in body.items() if value is not None and (key, value) != ("source", "")}


def settings_of(entry: CameraEntry) -> dict[str, Any]:
    """What ``Cameras.Add`` and ``Cameras.Update`` take besides name and source."""
    return {key: value for key, value in written(entry).items() if key not in ("name", "source")}


def entry_from_json(text: str) -> CameraEntry:
    """The inverse of :func:`written`, dumped as JSON."""
    return CameraEntry.model_validate(json.loads(text))


def without_password(entry: dict[str, Any], taken: Iterable[str] = ()) -> tuple[dict[str, Any], str | None]:
    """A written camera with a reference to a variable in place of its password, and that variable's name; ``None``
    where there is no password. ``taken``: names that other cameras' variables have."""
    match = _PASSWORD.search(entry.get("source", ""))
    if match is None:
        return entry, None
    variable = re.sub(r"\W", "_", entry["name"]).upper() + "_PASSWORD"
    variable = variable if not variable[0].isdigit() else f"CAMERA_{variable}"
    number, plain, used = 2, variable, set(taken)
    while variable in used:
        variable, number = f"{plain}_{number}", number + 1
    source = entry["source"]
    hidden = f"{source[: match.start('password')]}${{{variable}}}{source[match.end('password') :]}"
    return {**entry, "source": hidden}, variable
