"""Managers: every camera has one, which alone may change or remove it unless it is taken over."""

from __future__ import annotations

import re

from cluster.errors import ConfigError, ManagedElsewhereError

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
    """Who a caller over the network says it is; empty for ``cluster``.

    Raises:
        ConfigError: no name, or that of a part of the cluster itself.
    """
    if name in (CONFIGURATION, KUBERNETES):
        raise ConfigError(f"a manager must not be called {name!r}, which is a part of the cluster itself")
    if name and not _NAME.fullmatch(name):
        raise ConfigError(f"a manager's name is up to 63 letters, digits, _ . and -, not {name[:80]!r}")
    return name or CLUSTER


def check_manager(camera: str, owner: str, asking: str, *, takeover: bool = False) -> None:
    """Whether ``asking`` may change a camera of ``owner``.

    Raises:
        ManagedElsewhereError: it belongs to another manager, and is not to be taken over.
    """
    if owner != asking and not takeover:
        whose = _WHOSE.get(owner, f"belongs to the files that were applied as {owner!r}")
        raise ManagedElsewhereError(f"camera {camera!r} {whose}; change it there, or take it over (--takeover)")
