"""Where a run stands, on disk: written whole or not at all."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.errors import ConfigError


@dataclass(slots=True)
class Progress:
    """State of one stage. ``step``: steps done; ``elapsed_s``: seconds of training, over all its runs."""

    stage: str
    step: int
    elapsed_s: float
    done: bool
    model: dict[str, Tensor]
    average: dict[str, Tensor]
    heads: dict[str, Tensor]
    optimizer: dict[str, Any]
    settings: dict[str, Any]


def save(progress: Progress, path: Path) -> None:
    """Replace what is at ``path`` in one step: a run that dies while it writes keeps the checkpoint before."""
    body = {name: getattr(progress, name) for name in Progress.__slots__}
    fresh = path.with_suffix(".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(body, fresh)
    fresh.replace(path)


def load(path: Path, settings: dict[str, Any]) -> Progress | None:
    """What is at ``path``, or None.

    Raises:
        ConfigError: it cannot be read, or is of a run with other settings.
    """
    if not path.is_file():
        return None
    try:
        progress = Progress(**torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"the checkpoint {path} cannot be read ({error}); remove it, or train without it") from error
    for key, value in settings.items():
        if progress.settings.get(key) != value:
            raise ConfigError(
                f"the checkpoint {path} is of a run with {key} {progress.settings.get(key)!r}, not {value!r}; "
                "name another folder, or start afresh with --no-resume"
            )
    return progress
