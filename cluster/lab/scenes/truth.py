"""Ground truth of an encoded scene, stored as JSON beside the video."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from cluster.errors import ConfigError
from cluster.files import read_json, replacing
from cluster.lab.scenes.actors import CameraSettings, Scene
from cluster.lab.scenes.questions import MemoryQuestion, memory_questions, standing_question
from cluster.lab.scenes.render import SceneObject, SceneRenderer
from cluster.lab.scenes.vocabulary import EVENT_KINDS, SceneEvent

VERSION = 1
SAMPLES_PER_S = 2

MOVING = frozenset({"walking", "running", "climbing", "fighting", "driving"})
"""States in which an object moves or changes its pose."""

Box = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class TrueEvent(SceneEvent):
    """``boxes``: (second, box around all its actors in pixels) at every sample with any of them visible."""

    boxes: tuple[tuple[float, Box], ...]


@dataclass(frozen=True, slots=True)
class TrueObject:
    """One visible object; ``box``: left, top, right, bottom in pixels."""

    id: int
    kind: str
    state: str
    colour: str
    box: Box

    @property
    def moving(self) -> bool:
        return self.state in MOVING


@dataclass(frozen=True, slots=True)
class TrueSample:
    """All visible objects at one instant."""

    second: float
    objects: tuple[TrueObject, ...]


@dataclass(frozen=True, slots=True)
class StandingQuestion:
    """A standing question and its ``answer`` (yes or no) for the whole scene."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class SceneTruth:
    """Ground truth of one encoded scene.

    ``split``, ``index``, ``seconds`` and ``event`` (``any``, a kind or None) are the arguments that reproduce the
    scene; ``seed`` is that of its noise and appearance. ``mean_motion``: sum of box area × speed over all visible
    objects, mean over the 2 Hz samples, in shares of the picture × shares per second.
    """

    version: int
    name: str
    split: str
    index: int
    seed: int
    event: str | None
    seconds: float
    fps: float
    width: int
    height: int
    layout: str
    light: str
    strata: tuple[str, ...]
    camera: CameraSettings
    events: tuple[TrueEvent, ...]
    samples: tuple[TrueSample, ...]
    questions: tuple[StandingQuestion, ...]
    memory: tuple[MemoryQuestion, ...]
    mean_motion: float

    @property
    def scene_events(self) -> tuple[SceneEvent, ...]:
        """The events without boxes, as input of ``window_label``."""
        return tuple(SceneEvent(each.kind, each.start_s, each.end_s, each.actors) for each in self.events)

    def at(self, second: float) -> tuple[TrueObject, ...]:
        """Objects of the sample nearest to ``second``."""
        return min(self.samples, key=lambda sample: abs(sample.second - second)).objects

    def save(self, path: Path) -> None:
        """Write JSON atomically."""
        with replacing(path) as part:
            part.write_text(json.dumps(asdict(self), separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what ``save`` wrote. Raises ``ConfigError``: no such file, or not a scene's ground truth; the message
        names the first invalid field."""
        # Imported here: rendering scenes for training needs only numpy.
        from pydantic import TypeAdapter, ValidationError

        body = read_json(path)
        if not isinstance(body, dict) or "version" not in body:
            raise ConfigError(f"{path} is not the ground truth of a scene: it has no version")
        if body["version"] != VERSION:
            raise ConfigError(f"{path} has version {body['version']}, not {VERSION}; regenerate the scenes")
        try:
            truth = TypeAdapter(cls).validate_python(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path} is not the ground truth of a scene: {where}: {first['msg']}") from None
        truth._check(path)
        return truth

    def _check(self, path: Path) -> None:
        for event in self.events:
            if event.kind not in EVENT_KINDS:
                known = ", ".join(EVENT_KINDS)
                raise ConfigError(f"{path}: unknown event kind {event.kind!r}; there are: {known}")
            if not 0 <= event.start_s < event.end_s:
                raise ConfigError(f"{path}: a {event.kind} from {event.start_s:g} to {event.end_s:g} s is invalid")


def truth_path(clip: Path) -> Path:
    """Path of a clip's ground truth: ``test-000001.mp4`` -> ``test-000001.json``."""
    return clip.with_suffix(".json")


def scene_truth(scene: Scene, renderer: SceneRenderer, event: str | None = "any") -> SceneTruth:
    """Ground truth of a scene drawn by ``renderer`` at the camera's size; ``event`` as given to ``make_scene``."""
    times = [number / SAMPLES_PER_S for number in range(int(scene.seconds * SAMPLES_PER_S))]
    visible = {second: renderer.objects(second) for second in times}
    size = (renderer.width, renderer.height)
    happened = {event.kind for event in scene.events}
    return SceneTruth(
        version=VERSION,
        name=scene.name,
        split=scene.split,
        index=scene.index,
        seed=scene.seed,
        event=event,
        seconds=scene.seconds,
        fps=scene.camera.fps,
        width=scene.camera.width,
        height=scene.camera.height,
        layout=scene.layout.name,
        light=scene.light,
        strata=tuple(sorted(scene.strata)),
        camera=scene.camera,
        events=tuple(_event(each, visible, size) for each in scene.events),
        samples=tuple(
            TrueSample(
                second, tuple(TrueObject(o.id, o.kind, o.state, o.colour, _pixels(o.box, size)) for o in objects)
            )
            for second, objects in visible.items()
        ),
        questions=tuple(
            StandingQuestion(kind, standing_question(kind), "yes" if kind in happened else "no") for kind in EVENT_KINDS
        ),
        memory=tuple(memory_questions(scene)),
        mean_motion=_mean_motion(visible),
    )


def _event(event: SceneEvent, visible: dict[float, list[SceneObject]], size: tuple[int, int]) -> TrueEvent:
    boxes = []
    for second, objects in visible.items():
        part = [each.box for each in objects if each.id in event.actors]
        if part and event.start_s <= second < event.end_s:
            lefts, tops, rights, bottoms = zip(*part, strict=True)
            boxes.append((second, _pixels((min(lefts), min(tops), max(rights), max(bottoms)), size)))
    return TrueEvent(event.kind, event.start_s, event.end_s, event.actors, tuple(boxes))


def _pixels(box: tuple[float, float, float, float], size: tuple[int, int]) -> Box:
    width, height = size
    return (round(box[0] * width), round(box[1] * height), round(box[2] * width), round(box[3] * height))


def _mean_motion(visible: dict[float, list[SceneObject]]) -> float:
    if not visible:
        return 0.0
    total = 0.0
    for objects in visible.values():
        for each in objects:
            left, top, right, bottom = each.box
            total += (right - left) * (bottom - top) * (each.velocity[0] ** 2 + each.velocity[1] ** 2) ** 0.5
    return round(total / len(visible), 9)
