"""What a process is: version, engine, model, and the digest of the configuration it was started with."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from cluster.metrics.families import build_info
from cluster.metrics.primed import Role, prime
from cluster.redaction import KnownSecrets, redact_log

if TYPE_CHECKING:
    from cluster.config import SightlineConfig


def config_digest(config: SightlineConfig) -> str:
    """12 hexadecimal digits that change with any setting; passwords do not count, so that nobody can try them against
    the digest."""
    # Whatever else this process knows: the digest is the same in all of them.
    shown = redact_log(config.model_dump_json(), KnownSecrets())
    return hashlib.blake2b(shown.encode(), digest_size=6).hexdigest()


def describe_process(config: SightlineConfig, role: Role) -> None:
    """Show what this process is as ``sightline_build_info``, and what it counts at zero."""
    try:
        release = version("sightline")
    except PackageNotFoundError:
        release = "unknown"
    build_info.clear()
    build_info.labels(release, config.engine, config.model.name, config_digest(config)).set(1)
    prime(role, sinks=[sink.name for sink in config.alerts.sinks])
