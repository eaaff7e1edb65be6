"""The demo's videos: each camera's scene, encoded as that camera would, several in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from actors.cli.demo.plan import CAMERAS
from cluster.lab.scenes.clips import Clip
from cluster.lab.scenes.clips import make_clips as make

if TYPE_CHECKING:
    pass


def make_clips(folder: Path, on_clip: Callable[[], None] = lambda: None) -> dict[str, Path]:
    """Make ``folder/<camera>.mp4`` of every camera, with its ground truth; complete ones are kept.

    Args:
        folder: created if missing.
        on_clip: called after each clip.

    Raises:
        SightlineError: they cannot be written, or a process died.
    """
    clips = [Clip(camera.scene(), camera.event, folder / f"{camera.name}.mp4") for camera in CAMERAS]
    make(clips, folder, jobs=min(len(clips), os.cpu_count() or 1), on_clip=lambda _: on_clip())
    return {camera.name: clip.path for camera, clip in zip(CAMERAS, clips, strict=True)}
