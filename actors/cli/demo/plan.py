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
    from cluster.lab.scenes import Scene

SCENE_SECONDS = 40.0

THRESHOLD = 0.5
"""Of models that say none."""


@dataclass(frozen=True, slots=True)
class DemoCamera:
    """One camera: scene ``index`` of the split ``test``, on which no model was trained, made to show ``event``.

    ``questions``: kinds of events to ask for. ``pushed``: an agent sends it over gRPC.
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
        from cluster.lab.scenes import make_scene

        return make_scene("test", self.index, seconds=SCENE_SECONDS, event=self.event)


# Chosen by eye: different places, light, cameras and codecs, each with negative answers.
CAMERAS = (
    DemoCamera(
        "yard",
        "By day: somebody falls behind the passing cars and stays down",
        index=50,
        event="fall",
        questions=("fall", "intrusion", "stopped_vehicle"),
        pushed=False,
    ),
    DemoCamera(
        "road",
        "By day: a car stops in its lane, and a bus comes up beside it the wrong way",
        index=53,
        event="any",
        questions=("stopped_vehicle", "wrong_way", "fight"),
        pushed=False,
    ),
    DemoCamera(
        "gate",
        "At dusk: somebody climbs into the fenced zone, with traffic behind",
        index=30,
        event="intrusion",
        questions=("intrusion", "left_object", "wrong_way"),
        pushed=True,
    ),
    DemoCamera(
        "night",
        "At night: traffic and passers-by now and then, and nothing that anybody asks for",
        index=26,
        event=None,
        questions=("fall", "intrusion", "stopped_vehicle"),
        pushed=True,
    ),
)

HEAD = """\
# yaml-language-server: $schema=schema.json
# What `sightline demo` ran. Run it again by hand:
#
#   sightline serve -c {config}
{pushes}
#   sightline watch
#
# Window and sampling as the model was trained; a shorter window than the default, so that the demo need not take
# minutes. A camera without a source is pushed by an agent, see above.
"""
PUSH = "#   sightline push {clip} --gateway 127.0.0.1:50051 --camera {camera} --realtime --loop"


def write_config(folder: Path, clips: Mapping[str, Path], model: str, engine: str, settings: ModelSettings) -> Path:
    """Write ``config.yaml`` into ``folder``, which must exist; returns its path.

    ``clips``: camera -> its video; ``model``: its own ``settings`` decide window, sampling, questions and thresholds.
    """
    from actors.cli.evaluate import window_shape
    from cluster.lab.scenes import standing_question

    def camera_entry(camera: DemoCamera) -> dict[str, Any]:
        source: dict[str, Any] = {"source": ""}
        if not camera.pushed:
            source = {"source": str(clips[camera.name]), "source_options": {"loop": True, "realtime": True}}
        questions = [
            {
                "id": kind,
                # As the model was trained on it, or else in our own words.
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
    """Make ``folder/<camera>.mp4`` of every camera, with its ground truth; complete ones are kept, and ``on_clip`` is
    called after each. Raises ``SightlineError``: they cannot be written, or a process died."""
    from cluster.lab.scenes.encode import SceneClip, encode_missing_clips

    clips = [SceneClip(camera.scene(), camera.event, folder / f"{camera.name}.mp4") for camera in CAMERAS]
    encode_missing_clips(clips, folder, jobs=min(len(clips), os.cpu_count() or 1), on_clip=lambda _: on_clip())
    return {camera.name: clip.path for camera, clip in zip(CAMERAS, clips, strict=True)}
