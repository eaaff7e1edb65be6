"""The clip that a checkpoint is checked on, and questions whose answers a person would know."""

from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.scenes import EVENT_KINDS, make_scene, standing_question, window_label
from cluster.lab.scenes.encode import encode_scene
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.models.settings import ModelSettings
from cluster.types import Question, StreamSpec

WINDOW_S, STRIDE_S, FPS, ANCHOR_INTERVAL_S, THRESHOLD = 12.0, 4.0, 2.0, 4.0, 0.5
"""For checkpoints without settings of their own: a window that a large model answers in seconds on a CPU."""
COMPARED = 3
"""Windows computed in full and pruned, after the first."""
SCENE, SCENE_EVENT, SCENE_S = 29, "fall", 40.0
"""By day somebody walks in and falls, people pass, then cars: of the split that no model was trained on."""
SEEN_S = 2.0
"""An object that was visible as long is in the video."""
QUESTIONS = {
    "person": "Is there a person in this video?",
    "vehicle": "Is there a car in this video?",
    "fall": standing_question("fall"),
    "night": "Was this video taken at night?",
    "fire": "Is there a fire in this video?",
}


@dataclass(frozen=True, slots=True)
class CheckClip:
    """A clip, what is true of it (``None``: not known), and how windows of it are asked."""

    path: Path
    truth: SceneTruth | None
    spec: StreamSpec
    fps: float
    anchor_interval_s: float

    @property
    def seconds(self) -> float:
        """Seconds of video that are needed."""
        return self.spec.window_s + COMPARED * self.spec.stride_s

    def answer(self, question: str, start_s: float, end_s: float) -> bool | None:
        """What a person would answer of this window; ``None`` where they could not tell, or nobody knows."""
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
    """Draw and encode the bundled clip, with its truth beside it; returns its path."""
    path = folder / "check.mp4"
    encode_scene(make_scene("test", SCENE, seconds=SCENE_S, event=SCENE_EVENT), path, event=SCENE_EVENT)
    return path


def check_clip(path: Path, settings: ModelSettings) -> CheckClip:
    """The clip as this model wants to be asked: its own window and questions, else ours.

    The truth beside a clip of ``sightline scenes make`` is read too.
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
