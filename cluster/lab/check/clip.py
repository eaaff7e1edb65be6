"""The clip used to check a checkpoint, and questions with known answers."""

from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.scenes.encode import encode_scene
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.scenes.vocabulary import EVENT_KINDS, window_label
from cluster.models.settings import ModelSettings
from cluster.types import Question, StreamSpec

WINDOW_S, STRIDE_S, FPS, ANCHOR_INTERVAL_S, THRESHOLD = 12.0, 4.0, 2.0, 4.0, 0.5
"""Defaults for checkpoints without settings: a window that a large model answers in seconds on a CPU."""
COMPARED = 3
"""Windows after the first that are computed in full and pruned."""
SCENE, SCENE_EVENT, SCENE_S = 29, "fall", 40.0
"""Scene of the test split, unseen in training: by day, a person walks in and falls, then people and cars pass."""
SEEN_S = 2.0
"""Seconds of visibility after which an object counts as present."""
QUESTIONS = {
    "person": "Is there a person in this video?",
    "vehicle": "Is there a car in this video?",
    "fall": standing_question("fall"),
    "night": "Was this video taken at night?",
    "fire": "Is there a fire in this video?",
}


@dataclass(frozen=True, slots=True)
class CheckClip:
    """A clip, its ground truth (``None``: unknown), and how its windows are asked."""

    path: Path
    truth: SceneTruth | None
    spec: StreamSpec
    fps: float
    anchor_interval_s: float

    @property
    def seconds(self) -> float:
        """Required seconds of video."""
        return self.spec.window_s + COMPARED * self.spec.stride_s

    def answer(self, question: str, start_s: float, end_s: float) -> bool | None:
        """True answer for a window; ``None`` if unknown or undecidable."""
        truth = self.truth
        if truth is None or end_s > truth.seconds:
            return None
        if question in EVENT_KINDS:
            return window_label(truth.scene_events, question, start_s, end_s)
        if question in ("person", "vehicle"):
            samples = [each for each in truth.samples if start_s <= each.second < end_s]
            seen = sum(any(it.kind == question for it in each.objects) for each in samples)
            needed = SEEN_S * len(samples) / (end_s - start_s)
            return True if seen >= needed else None if seen else False
        return {"night": None if truth.light == "dusk" else truth.light == "night", "fire": False}.get(question)


def draw_clip(folder: Path) -> Path:
    """Render and encode the bundled clip with its ground truth file; returns the clip's path."""
    path = folder / "check.mp4"
    encode_scene(make_scene("test", SCENE, seconds=SCENE_S, event=SCENE_EVENT), path, event=SCENE_EVENT)
    return path


def check_clip(path: Path, settings: ModelSettings) -> CheckClip:
    """The clip with the model's own window and questions, else the defaults.

    Also reads the ground truth file that ``sightline scenes make`` writes next to a clip.
    """
    try:
        truth = SceneTruth.load(truth_path(path))
    except ConfigError:
        truth = None
    texts = settings.questions or QUESTIONS
    spec = StreamSpec(
        "check",
        tuple(Question(name, text, settings.threshold_of(name) or THRESHOLD) for name, text in texts.items()),
        settings.window_s or WINDOW_S,
        settings.stride_s or STRIDE_S,
        static_gate=False,
        patient=True,
    )
    if spec.stride_s > spec.window_s:
        spec = replace(spec, stride_s=spec.window_s)
    return CheckClip(path, truth, spec, settings.fps or FPS, settings.anchor_interval_s or ANCHOR_INTERVAL_S)
