"""The demo's four cameras, their questions and videos, and a configuration that a user can run again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.models.settings import ModelSettings

if TYPE_CHECKING:
    from cluster.lab.scenes import Scene

SCENE_SECONDS = 40.0

# For models without settings of their own: the window that the bundled one was trained for.
WINDOW_S, STRIDE_S, FPS, ANCHOR_INTERVAL_S, THRESHOLD = 20.0, 4.0, 2.0, 8.0, 0.5


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
        """The scene it films."""
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

CONFIG = """\
# yaml-language-server: $schema={{ schema }}
# What `sightline demo` ran. Run it again by hand:
#
#   sightline serve -c {{ here | shell }}
{% for camera in cameras if camera.pushed %}
#   sightline push {{ clips[camera.name] | shell }} --to 127.0.0.1:50051 --camera {{ camera.name }} --realtime --loop
{% endfor %}
#   sightline watch
model:
  name: {{ model | quoted }}

engine: {{ engine }}

# As the model was trained; a shorter window than the default, so that the demo need not take minutes.
sampling:
  fps: {{ fps }}
  anchor_interval_s: {{ anchor_interval_s }}

window:
  length_s: {{ window_s }}
  stride_s: {{ stride_s }}

cameras:
{% for camera in cameras %}
  - name: {{ camera.name }}
{% if camera.pushed %}
    source: "" # an agent pushes it, see above
{% else %}
    source: {{ clips[camera.name] | quoted }}
    source_options: {loop: true, realtime: true}
{% endif %}
    questions:
{% for kind in camera.questions %}
      - id: {{ kind }}
        text: {{ text(kind) | quoted }}
        threshold: {{ threshold(kind) }}
{% endfor %}
{% endfor %}
"""


def write_config(folder: Path, clips: Mapping[str, Path], model: str, engine: str, settings: ModelSettings) -> Path:
    """Write ``config.yaml`` into ``folder``; returns its path.

    Args:
        clips: camera -> its video.
        model: name of the model, whose own ``settings`` decide window, sampling, questions and thresholds.
    """
    path = folder / "config.yaml"
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {"quoted": _quoted, "shell": lambda path: shlex.quote(str(path))}
    environment.globals |= {
        "text": lambda kind: question_text(settings, kind),
        "threshold": lambda kind: _or(settings.threshold_of(kind), THRESHOLD),
    }
    values = {
        "window_s": _or(settings.window_s, WINDOW_S),
        "stride_s": _or(settings.stride_s, STRIDE_S),
        "fps": _or(settings.fps, FPS),
        "anchor_interval_s": _or(settings.anchor_interval_s, ANCHOR_INTERVAL_S),
    }
    text = environment.from_string(CONFIG).render(
        cameras=CAMERAS, clips=clips, model=model, engine=engine, here=path, schema="schema.json", **values
    )
    path.write_text(text, encoding="utf-8")
    return path


def question_text(settings: ModelSettings, kind: str) -> str:
    """The question for an event as the model was trained on it, or else our own wording."""
    from cluster.lab.scenes import standing_question

    return settings.questions.get(kind) or standing_question(kind)


def _or(value: float | None, otherwise: float) -> str:
    return f"{otherwise if value is None else value:.10g}"


def _quoted(text: object) -> str:
    """As a quoted YAML string."""
    return "'" + str(text).replace("'", "''") + "'"


def make_clips(folder: Path, on_clip: Callable[[], None] = lambda: None) -> dict[str, Path]:
    """Make ``folder/<camera>.mp4`` of every camera, with its ground truth; complete ones are kept.

    Args:
        folder: created if missing.
        on_clip: called after each clip.

    Raises:
        SightlineError: they cannot be written, or a process died.
    """
    from cluster.lab.scenes.encode import SceneClip, encode_missing_clips

    clips = [SceneClip(camera.scene(), camera.event, folder / f"{camera.name}.mp4") for camera in CAMERAS]
    encode_missing_clips(clips, folder, jobs=min(len(clips), os.cpu_count() or 1), on_clip=lambda _: on_clip())
    return {camera.name: clip.path for camera, clip in zip(CAMERAS, clips, strict=True)}
