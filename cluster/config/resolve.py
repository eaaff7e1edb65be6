"""Global sections, then a camera's own keys: the settings one camera runs with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from cluster.config.base import Section
from cluster.config.camera import CameraConfig, CameraEntry
from cluster.config.memory import MemoryConfig
from cluster.config.pruning import PruningConfig
from cluster.config.root import SightlineConfig
from cluster.errors import ConfigError

S = TypeVar("S", bound=Section)

_OPTIONS_OF: Mapping[type[Section], Mapping[str, str]] = {
    PruningConfig: {"policy": "options"},
    MemoryConfig: {kind: f"{kind}_options" for kind in ("compressor", "organiser", "retriever")},
}
"""Section -> key that names a policy -> key with its options."""


def deep_merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``override`` over ``base``: mappings merge key by key, anything else (lists too) is replaced."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def overlay(base: S, override: S | None) -> S:
    """The section ``base`` with the keys that were written in ``override``."""
    if override is None:
        return base
    written = override.model_dump(exclude_unset=True)
    below = base.model_dump()
    for policy, options in _OPTIONS_OF.get(type(base), {}).items():
        if written.get(policy, below[policy]) != below[policy]:
            # Another policy has other parameters: the global ones mean nothing to it.
            below[options] = {}
    return type(base).model_validate(deep_merge(below, written))


def resolve(config: SightlineConfig, entry: CameraEntry) -> CameraConfig:
    """A camera's settings, without checking them."""
    return CameraConfig(
        name=entry.name,
        source=entry.source,
        priority=entry.priority,
        sampling=overlay(config.sampling, entry.sampling),
        pruning=overlay(config.pruning, entry.pruning),
        window=overlay(config.window, entry.window),
        memory=overlay(config.memory, entry.memory),
        source_options=overlay(config.source, entry.source_options),
        questions=config.questions if entry.questions is None else entry.questions,
        privacy_masks=entry.privacy_masks,
    )


def camera_settings(config: SightlineConfig, camera: str | CameraEntry) -> CameraConfig:
    """The resolved settings of a camera of the file (by name) or of one added at run time (by entry).

    Raises:
        ConfigError: no camera of that name, or settings that contradict each other.
    """
    from cluster.config.conflicts import camera_conflicts
    from cluster.config.problems import InvalidConfigError

    if isinstance(camera, str):
        entries = [entry for entry in config.cameras if entry.name == camera]
        if not entries:
            known = ", ".join(entry.name for entry in config.cameras) or "none"
            raise ConfigError(f"there is no camera {camera!r} in the configuration; there are: {known}")
        camera = entries[0]
    resolved = resolve(config, camera)
    found = camera_conflicts(resolved, (), camera, config.tiers)
    if found:
        raise InvalidConfigError(found, where=f"camera {camera.name}")
    return resolved
