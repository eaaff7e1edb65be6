"""The demo's four cameras, their questions and videos, and a configuration that a user can run again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cluster.models.settings import ModelSettings

if TYPE_CHECKING:
    from cluster.lab.scenes.actors import Scene

SCENE_SECONDS = 40.0

THRESHOLD = 0.5
"""For models without thresholds of their own."""


@dataclass(frozen=True, slots=True)
class DemoCamera:
    """A camera that plays scene ``index`` of the split ``test``, on which no model was trained, made to show ``event``.

    ``questions``: event kinds to ask about. ``pushed``: fed by an agent over gRPC.
    """

    name: str
    about: str
    index: int
    event: str | None
    questions: tuple[str, ...]
    pushed: bool

    @property
    def fed_by(self) -> str:
        return "gRPC push" if self.pushed else "file (pull)"

    def scene(self) -> Scene:
        from cluster.lab.scenes.scene import make_scene

        return make_scene("test", self.index, seconds=SCENE_SECONDS, event=self.event)


# Chosen by eye: different places, light, cameras and codecs, each with negative answers.
CAMERAS = (
    DemoCamera(
        "yard",
        "By day: a person falls behind passing cars and stays down",
        index=50,
        event="fall",
        questions=("fall", "intrusion", "stopped_vehicle"),
        pushed=False,
    ),
    DemoCamera(
        "road",
        "By day: a car stops in its lane, and a bus passes it in the wrong direction",
        index=53,
        event="any",
        questions=("stopped_vehicle", "wrong_way", "fight"),
        pushed=False,
    ),
    DemoCamera(
        "gate",
        "At dusk: a person climbs into the fenced zone, with traffic behind",
        index=30,
        event="intrusion",
        questions=("intrusion", "left_object", "wrong_way"),
        pushed=True,
    ),
    DemoCamera(
        "night",
        "At night: occasional traffic and passers-by, but no event",
        index=26,
        event=None,
        questions=("fall", "intrusion", "stopped_vehicle"),
        pushed=True,
    ),
)

HEAD = """\
# yaml-language-server: $schema=schema.json
# Configuration of `sightline demo`. To run it by hand:
#
#   sightline serve -c {config}
{pushes}
#   sightline watch
#
# Window and sampling are those that the model was trained with; the window is shorter than the default to keep the
# demo short. Cameras without a source are fed by the agents above.
"""
PUSH = "#   sightline push {clip} --gateway 127.0.0.1:50051 --camera {camera} --realtime --loop"


def write_config(folder: Path, clips: Mapping[str, Path], model: str, engine: str, settings: ModelSettings) -> Path:
    """Write ``config.yaml`` into ``folder``, which must exist; returns its path.

    ``clips``: camera -> video; ``settings``: the model's own window, sampling, questions and thresholds.
    """
    from actors.cli.evaluate import window_shape
    from cluster.lab.scenes.questions import standing_question

    def camera_entry(camera: DemoCamera) -> dict[str, Any]:
        source: dict[str, Any] = {"source": ""}
        if not camera.pushed:
            source = {"source": str(clips[camera.name]), "source_options": {"loop": True, "realtime": True}}
        questions = [
            {
                "id": kind,
                # In the words that the model was trained on, if known.
                "text": settings.questions.get(kind) or standing_question(kind),
                "threshold": THRESHOLD if (own := settings.threshold_of(kind)) is None else own,
            }
            for kind in camera.questions
        ]
        return {"name": camera.name, **source, "questions": questions}

    shape = window_shape(settings)
    body = {
        "model": {"name": model},
        "engine": engine,
        "sampling": {"fps": shape.fps, "anchor_interval_s": shape.anchor_interval_s},
        "window": {"length_s": shape.window_s, "stride_s": shape.stride_s},
        "cameras": [camera_entry(camera) for camera in CAMERAS],
    }
    path = folder / "config.yaml"
    pushes = [
        PUSH.format(clip=shlex.quote(str(clips[camera.name])), camera=camera.name)
        for camera in CAMERAS
        if camera.pushed
    ]
    head = HEAD.format(config=shlex.quote(str(path)), pushes="\n".join(pushes))
    path.write_text(head + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")
    return path


def make_clips(folder: Path, on_clip: Callable[[], None] = lambda: None) -> dict[str, Path]:
    """Render ``folder/<camera>.mp4`` and its ground truth for every camera; complete clips are kept. ``on_clip`` is
    called after each. Raises ``SightlineError``: they cannot be written, or a process died."""
    from cluster.lab.scenes.encode import SceneClip, encode_missing_clips

    clips = [SceneClip(camera.scene(), camera.event, folder / f"{camera.name}.mp4") for camera in CAMERAS]
    encode_missing_clips(clips, folder, jobs=min(len(clips), os.cpu_count() or 1), on_clip=lambda _: on_clip())
    return {camera.name: clip.path for camera, clip in zip(CAMERAS, clips, strict=True)}
