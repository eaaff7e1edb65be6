"""Training examples, each a deterministic function of its number: scene, segment, pruning, contexts and questions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.lab.scenes.actors import Scene
from cluster.lab.scenes.questions import memory_questions, phrasings, standing_question
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.vocabulary import EVENT_KINDS, window_label
from cluster.lab.training.config import SHAPES
from cluster.lab.training.pruning import (
    ImageDegradation,
    PrunedFrame,
    Pruning,
    picture_grid,
    prune_samples,
    render_samples,
    sample_times,
)
from cluster.types import PatchGrid

# Shares of training scenes with zero, one, two and three kinds of event. A model trained on single-event scenes had an
# AUC of 0.99 for wrong-way drivers on such scenes, but 0.86 on scenes with other events.
_EVENTS = (0.1, 0.22, 0.4, 0.28)
# Share of scenes that are reserved for a hard kind. Bags are the smallest objects (a token or less) with the most
# look-alikes; pruned frames rarely show on which side of the road a vehicle should drive.
_OVERSAMPLED = {"left_object": 0.16, "wrong_way": 0.16}
# State of an actor -> event it resembles. Scenes with such an actor are always asked about that event.
_LOOKALIKES = {
    "attended": "left_object",
    "furniture": "left_object",
    "crouching": "fall",
    "sitting": "fall",
    "parked": "stopped_vehicle",
    "driving": "wrong_way",
}
# Minimum number of kinds asked about per window.
_MIN_KINDS = 4
_STRIDE = 4
_WINDOW = 20
# Share of unpruned examples. At a third, F1 on pruned windows was 0.05 below that on unpruned ones.
_COMPLETE = 0.22
# Maximum visual tokens of a sequence, in complete frames: bounds memory and time of a step.
_MAX_FRAMES = 26


@dataclass(frozen=True, slots=True)
class ExampleQuestion:
    """A question about frames ``[opening, end)``. ``kind``: a kind of event, or ``memory``; ``answer``: one word."""

    opening: int
    end: int
    kind: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sequence: frames, the first frame that each visual token attends to (``context``), and questions.

    ``visual_tokens`` ``[t, D]`` float16: the frames encoded by a frozen tower; None if the trainer encodes them.
    """

    scene: str
    frames: tuple[PrunedFrame, ...]
    context: np.ndarray[tuple[int], np.dtype[np.int64]]
    questions: tuple[ExampleQuestion, ...]
    visual_tokens: np.ndarray[tuple[int, int], np.dtype[np.float16]] | None = None


# Training scenes are drawn from indices below this.
_SCENES = 2**31


@dataclass(frozen=True, slots=True)
class TowerExamples:
    """Maps an example number to single frames of one scene, some complete, most thinned to tokens near objects."""

    shape: str
    seed: int
    frames: int = 5

    def __call__(self, number: int) -> Example:
        rng = np.random.default_rng([self.seed, 1, number])
        shape = SHAPES[self.shape]
        grid = picture_grid(shape)
        scene = sample_scene(number, rng)
        times = sample_times(scene.seconds, shape.fps, rng)
        chosen = _draw_frames(scene, times, self.frames, rng)
        degradation = ImageDegradation.draw(rng)
        pruning = Pruning()
        samples = render_samples(
            scene, shape, [times[2 * first + k] for first in chosen for k in range(2)], degradation
        )
        frames = []
        for place in range(len(chosen)):
            (frame,) = prune_samples(samples[2 * place : 2 * place + 2], scene.events, grid, pruning, rng)
            frames.append(_thin(frame, grid, rng) if rng.random() < 0.75 else frame)
        return Example(scene.name, tuple(frames), _contexts(frames, range(len(frames))), ())


@dataclass(frozen=True, slots=True)
class WindowExamples:
    """Maps an example number to a segment of one scene with questions at many instants."""

    shape: str
    seed: int

    def __call__(self, number: int) -> Example:
        rng = np.random.default_rng([self.seed, 2, number])
        scene = sample_scene(number, rng)
        shape = SHAPES[self.shape]
        times = sample_times(scene.seconds, shape.fps, rng)
        length = len(times) // 2
        complete = rng.random() < _COMPLETE
        alone = complete or rng.random() < 0.35
        count = length
        if alone:
            count = int(rng.integers(8, 23) if complete else rng.integers(20, 29))
        first = _segment_start(scene, times, min(count, length), rng)
        degradation = ImageDegradation.draw(rng)
        samples = render_samples(scene, shape, times[2 * first : 2 * (first + count)], degradation)
        pruning = Pruning() if complete else Pruning.draw(rng)
        frames = prune_samples(samples, scene.events, picture_grid(shape), pruning, rng)
        frames = limit_tokens(frames)
        return growing_window_example(scene, frames, rng) if alone else sliding_window_example(scene, frames, rng)


@dataclass(frozen=True, slots=True)
class ValidationExamples:
    """Maps a number to a whole validation scene with every standing question in every 20 s window.

    Three of four scenes show two kinds of event and one shows none: F1 on single-event scenes (0.86) overestimated F1
    on ordinary scenes (0.78).
    """

    shape: str

    def __call__(self, number: int) -> Example:
        rng = np.random.default_rng([7, number])
        first, turn = number % len(EVENT_KINDS), number // len(EVENT_KINDS)
        second = (first + 1 + turn % (len(EVENT_KINDS) - 1)) % len(EVENT_KINDS)
        event = None if number % 4 == 3 else (EVENT_KINDS[first], EVENT_KINDS[second])
        scene = make_scene("validation", number, event=event)
        shape = SHAPES[self.shape]
        samples = render_samples(
            scene, shape, sample_times(scene.seconds, shape.fps, rng), ImageDegradation(quality=70)
        )
        pruning = Pruning("replenish", phase=int(rng.integers(8)))
        frames = prune_samples(samples, scene.events, picture_grid(shape), pruning, rng)
        windows = window_openings(frames, _WINDOW)
        questions = [
            ExampleQuestion(opening, end, kind, standing_question(kind), "yes" if shown else "no")
            for end in range(_STRIDE, len(frames) + 1, _STRIDE)
            for kind in EVENT_KINDS
            if (shown := label(scene, kind, frames, opening := windows[end - 1], end)) is not None
        ]
        return Example(scene.name, tuple(frames), _contexts(frames, windows), tuple(questions))


def sample_scene(number: int, rng: np.random.Generator) -> Scene:
    """Draw a training scene; kinds of event are balanced (but for ``_OVERSAMPLED``), alone and combined.

    ``number`` selects the first kind; everything else is random, including the scene's index: otherwise every stage and
    run would see the same streets.
    """
    count = int(rng.choice(len(_EVENTS), p=_EVENTS))
    usual = EVENT_KINDS[number % len(EVENT_KINDS)]
    first = str(rng.choice([*_OVERSAMPLED, usual], p=[*_OVERSAMPLED.values(), 1 - sum(_OVERSAMPLED.values())]))
    others = rng.permutation([kind for kind in EVENT_KINDS if kind != first])
    kinds = (first, *(str(kind) for kind in others))[:count]
    return make_scene("train", int(rng.integers(_SCENES)), event=kinds)


def window_openings(frames: Sequence[PrunedFrame], window: int) -> list[int]:
    """Opening frame of the window of ``window`` frames that ends with each frame: the last complete frame at or before
    the window's nominal start."""
    complete = [index for index, frame in enumerate(frames) if frame.complete]
    return [max(c for c in complete if c <= max(0, end - window)) for end in range(1, len(frames) + 1)]


def label(
    scene: Scene, kind: str, frames: Sequence[PrunedFrame], opening: int, end: int, window: int = _WINDOW
) -> bool | None:
    """Whether frames ``[opening, end)`` show an event; None if undecidable, or if only frames before the nominal start
    do, which the model cannot know."""
    close = frames[end - 1].time_s + 1.0
    shown = window_label(scene.events, kind, frames[opening].time_s, close)
    nominal = window_label(scene.events, kind, frames[max(opening, end - window)].time_s, close)
    return shown if shown == nominal else None


def make_questions(
    scene: Scene,
    frames: Sequence[PrunedFrame],
    windows: Sequence[int] | None,
    rng: np.random.Generator,
    span: int = _WINDOW,
) -> tuple[ExampleQuestion, ...]:
    """Questions every four frames: about the scene's events, about events with look-alikes in it, and about others.

    ``windows``: opening of each frame's window; None for a single window that grows from frame 0.
    """
    questions: list[ExampleQuestion] = []
    alike = {_LOOKALIKES[key.state] for actor in scene.actors for key in actor.keys if key.state in _LOOKALIKES}
    sure = {event.kind for event in scene.events} | alike
    for end in range(int(rng.integers(3, 7)), len(frames) + 1, _STRIDE):
        opening = 0 if windows is None else windows[end - 1]
        others = [kind for kind in EVENT_KINDS if kind not in sure]
        more = min(len(others), max(1, _MIN_KINDS - len(sure)))
        kinds = [*sorted(sure), *(str(kind) for kind in rng.choice(others, size=more, replace=False))]
        for kind in kinds:
            shown = label(scene, kind, frames, opening, end, len(frames) if windows is None else span)
            if shown is not None:
                wording = phrasings(kind)
                text = wording[0] if rng.random() < 0.4 else wording[int(rng.integers(len(wording)))]
                questions.append(ExampleQuestion(opening, end, kind, text, "yes" if shown else "no"))
    return tuple(questions)


def growing_window_example(scene: Scene, frames: Sequence[PrunedFrame], rng: np.random.Generator) -> Example:
    """A camera that has just started: a single window grows from its first frame."""
    return Example(
        scene.name, tuple(frames), _contexts(frames, [0] * len(frames)), make_questions(scene, frames, None, rng)
    )


def sliding_window_example(scene: Scene, frames: Sequence[PrunedFrame], rng: np.random.Generator) -> Example:
    """A running camera: windows slide, and tokens computed in older windows are reused in newer ones."""
    span = _WINDOW if rng.random() < 0.6 else int(rng.integers(12, 33))
    windows = window_openings(frames, span)
    # A token's context is that of the window that computed it, which ended up to one stride later.
    context = _contexts(frames, window_openings(frames, int(rng.integers(12, 41)) if rng.random() < 0.5 else span))
    if rng.random() < 0.4:
        context = _with_refresh(frames, context, rng)
    questions = [*make_questions(scene, frames, windows, rng, span)]
    if frames[0].time_s < 1.0:
        questions += _memory_questions(scene, frames, rng)
    return Example(scene.name, tuple(frames), context, tuple(questions))


def _memory_questions(scene: Scene, frames: Sequence[PrunedFrame], rng: np.random.Generator) -> list[ExampleQuestion]:
    """Questions about everything seen so far, at up to two instants."""
    questions: list[ExampleQuestion] = []
    for end in sorted({int(rng.integers(10, len(frames))), len(frames)} if len(frames) > 10 else {len(frames)}):
        asked = memory_questions(scene, frames[end - 1].time_s + 1.0)
        # Balanced between yes, no and other words: most colours do not occur in a scene, so most answers are "no".
        kinds = ["yes", "no", "word"]
        for kind in rng.choice(kinds, size=2, replace=False):
            fitting = [q for q in asked if q.answer == kind or (kind == "word" and q.answer not in kinds)]
            if fitting:
                chosen = fitting[int(rng.integers(len(fitting)))]
                questions.append(ExampleQuestion(0, end, "memory", chosen.text, chosen.answer))
    return questions


def _contexts(frames: Sequence[PrunedFrame], first: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Expand the first attended frame from per frame to per token."""
    return np.repeat(np.array(first, np.int64), [len(frame.cells) for frame in frames])


def _with_refresh(
    frames: Sequence[PrunedFrame], context: np.ndarray[tuple[int], np.dtype[np.int64]], rng: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Context as if a window had opened at a random complete frame and recomputed a random share of its tokens."""
    complete = [index for index, frame in enumerate(frames) if frame.complete]
    opening = complete[int(rng.integers(len(complete)))]
    frame_of = _contexts(frames, range(len(frames)))
    anew = (frame_of >= opening) & (rng.random(len(context)) < rng.uniform(0.1, 0.9))
    return np.where(anew, np.maximum(context, opening), context)


def _segment_start(scene: Scene, times: Sequence[float], count: int, rng: np.random.Generator) -> int:
    """First frame of a segment of ``count`` frames, which mostly includes the start of an event."""
    last = len(times) // 2 - count
    if last <= 0:
        return 0
    if scene.events and rng.random() < 0.75:
        event = scene.events[int(rng.integers(len(scene.events)))]
        begins = int(np.searchsorted(times[::2], event.start_s))
        return int(np.clip(begins - rng.integers(2, max(3, count - 3)), 0, last))
    return int(rng.integers(0, last + 1))


def limit_tokens(frames: list[PrunedFrame]) -> list[PrunedFrame]:
    """The leading frames that fit into a training step; the first frame must be complete."""
    total = np.cumsum([len(frame.cells) for frame in frames])
    return frames[: int(np.searchsorted(total, _MAX_FRAMES * total[0], side="right"))]


def _draw_frames(scene: Scene, times: Sequence[float], count: int, rng: np.random.Generator) -> list[int]:
    """Indices of random frames of a scene, up to half of them during an event."""
    every = range(len(times) // 2)
    during = [i for i in every if any(e.start_s <= times[2 * i] < e.end_s for e in scene.events)]
    some = [int(i) for i in rng.permutation(during)[: count // 2]]
    rest = [int(i) for i in rng.permutation([i for i in every if i not in some])[: count - len(some)]]
    return [*some, *rest]


def _thin(frame: PrunedFrame, grid: PatchGrid, rng: np.random.Generator) -> PrunedFrame:
    """Keep most tokens on objects, some of their neighbours and a few others, as a pruner would."""
    there = np.zeros((grid.group_rows + 2, grid.group_cols + 2), bool)
    there[1:-1, 1:-1] = frame.labels.covered.reshape(grid.group_rows, grid.group_cols)
    near = np.zeros((grid.group_rows, grid.group_cols), bool)
    for row in range(3):
        for col in range(3):
            near |= there[row : row + grid.group_rows, col : col + grid.group_cols]
    stays = frame.labels.covered & (rng.random(grid.tokens) < 0.97)
    stays |= near.ravel() & (rng.random(grid.tokens) < 0.35)
    stays |= rng.random(grid.tokens) < 0.08
    stays[int(rng.integers(grid.tokens))] = True
    return PrunedFrame(
        time_s=frame.time_s,
        complete=bool(stays.all()),
        cells=frame.cells[stays],
        patches=frame.patches[np.repeat(stays, grid.merge**2)],
        labels=frame.labels.take(stays),
    )
