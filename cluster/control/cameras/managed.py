"""A camera as it was written, and whose it is; its written form as JSON, and with variables for its secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from cluster.config.base import Section
from cluster.config.camera import CameraEntry
from cluster.control.cameras.managers import CLUSTER
from cluster.redaction import REVEAL, SourceAddress
from cluster.redaction.address import HIDDEN


class Managed(Section):
    """What the controller keeps of a camera besides its resolved settings, and what outlives its restarts."""

    entry: CameraEntry = Field(description="The keys that were written.")
    manager: str = Field(default=CLUSTER, description="Who alone may change it.")
    uid: str = Field(default="", description="Of the Kubernetes object it was made from; another is another camera.")
    life: str = Field(default="", description="Given when it is added; another when it is removed and added again.")

    def to_json(self) -> str:
        """The inverse of ``Managed.model_validate_json``, with secrets; keys that were not written stay so."""
        return self.model_dump_json(exclude_unset=True, context=dict(REVEAL))


def written(entry: CameraEntry) -> dict[str, Any]:
    """The keys of a camera that were given: plain values, and the source as a :class:`SourceAddress`."""
    body: dict[str, Any] = entry.model_dump(mode="json", exclude_unset=True)
    if "source" in body:
        body["source"] = entry.source or None
    return {key: value for key, value in body.items() if value is not None}


def settings_of(entry: CameraEntry) -> dict[str, Any]:
    """What ``Cameras.Add`` and ``Cameras.Update`` take besides name and source."""
    return {key: value for key, value in written(entry).items() if key not in ("name", "source")}


def entry_to_json(entry: CameraEntry, *, secrets: bool) -> str:
    """:func:`written` as JSON, the source in full only with ``secrets``."""
    return json.dumps(written(entry), default=SourceAddress.reveal if secrets else str)


def entry_from_json(text: str) -> CameraEntry:
    """The inverse of :func:`entry_to_json`."""
    return CameraEntry.model_validate(json.loads(text))


def with_variables(entry: dict[str, Any], taken: Iterable[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """A camera that was exported without secrets, with a reference to a variable in place of each of them, and the
    variables' names. ``taken``: names that other cameras' variables have."""
    first, *others = str(entry.get("source", "")).split(HIDDEN)
    if not others:
        return entry, []
    plain = re.sub(r"\W", "_", entry["name"]).upper() + "_PASSWORD"
    plain = plain if not plain[0].isdigit() else f"CAMERA_{plain}"
    used, variables, source = set(taken), [], first
    for other in others:
        variable, number = plain, 2
        while variable in used:
            variable, number = f"{plain}_{number}", number + 1
        used.add(variable)
        variables.append(variable)
        source += f"${{{variable}}}{other}"
    return {**entry, "source": source}, variables
