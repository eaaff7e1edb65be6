"""A training sequence is the engine's window: same rows, same positions, same logits."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.engine.native import NativeEngine
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.lab.training.config import Shape
from cluster.lab.training.examples import Example, ExampleQuestion
from cluster.lab.training.loss import margins
from cluster.lab.training.pruning import ImageDegradation, Pruning, prune_samples, render_samples, sample_frames
from cluster.lab.training.sequence_layout import SequenceQuestion, lay_out_sequence
from cluster.lab.training.trainable_model import TrainableModel, patch_batches
from cluster.models.base import FrameSpan
from cluster.types import FrameSample, PatchGrid, Question, StreamSpec

FRAMES = 12


@pytest.fixture(scope="module")
def scene_samples(shape: Shape):
    scene = make_scene("train", 4, event="fall")
    return scene, render_samples(scene, shape, [0.1 + k / 2 for k in range(2 * FRAMES)], ImageDegradation())


def live_frames(samples, grid: PatchGrid, pruning: Pruning) -> list[FrameSample]:
    return [replace(cut, stream="cam") for cut in sample_frames(samples, grid, pruning)]


def engine_scores(model: TrainableModel, frames: Sequence[FrameSample], **spec: object) -> dict[tuple[int, str], float]:
    """(last frame of the window + 1, question) -> score."""
    engine = NativeEngine(model)
    questions = tuple(Question(kind, standing_question(kind)) for kind in EVENT_KINDS)
    engine.admit(StreamSpec("cam", questions, static_gate=False, **spec))
    scores = {}
    for frame in frames:
        for request in engine.push(frame):
            for answer in engine.step([request]):
                inside = sum(f.pts + f.duration // 8 < answer.end for f in frames)
                scores[(inside, answer.question)] = answer.score
    return scores


def trained_scores(
    model: TrainableModel, frames, context, windows: dict[int, int], grid
) -> dict[tuple[int, str], float]:
    questions = tuple(
        ExampleQuestion(opening, end, kind, standing_question(kind), "no")
        for end, opening in windows.items()
        for kind in EVENT_KINDS
    )
    margin, asked = margins(model, [Example("x", tuple(frames), context, questions)], grid)
    return {(each.end, each.kind): float(value) for each, value in zip(asked.questions, margin.sigmoid(), strict=True)}


@pytest.mark.parametrize("pruner", ["none", "replenish", "codecsight"])
def test_training_forward_is_the_engines(
    scene_samples, trainable: TrainableModel, grid: PatchGrid, pruner: str
) -> None:
    scene, samples = scene_samples
    pruning = Pruning(pruner, anchor=4, phase=1)
    live = live_frames(samples, grid, pruning)
    frames = prune_samples(samples, scene.events, grid, pruning, np.random.default_rng(0))
    assert [len(f.cells) for f in frames] == [f.tokens for f in live]
    if pruner != "none":
        assert 0 < sum(len(f.cells) for f in frames[1:]) < (FRAMES - 1) * grid.tokens

    # One window that grows from the stream's beginning: nothing slides, every token keeps its first context.
    wanted = engine_scores(trainable, live, window_s=float(FRAMES), stride_s=4.0, refresh="none")
    context = np.zeros(sum(len(f.cells) for f in frames), np.int64)
    got = trained_scores(trainable, frames, context, dict.fromkeys((4, 8, 12), 0), grid)
    assert got.keys() == wanted.keys()
    assert len(set(wanted.values())) > len(EVENT_KINDS)
    for key, score in wanted.items():
        assert got[key] == pytest.approx(score, abs=2e-5)


def test_a_fully_refreshed_window_is_one_whose_tokens_all_open_with_it(
    scene_samples, trainable: TrainableModel, grid: PatchGrid
) -> None:
    """The engine moves a window's tokens back to the system prompt; a sequence that begins there needs no moving."""
    scene, samples = scene_samples
    pruning = Pruning("replenish", anchor=4, phase=0)
    live = live_frames(samples, grid, pruning)
    frames = prune_samples(samples, scene.events, grid, pruning, np.random.default_rng(0))
    wanted = engine_scores(trainable, live, window_s=8.0, stride_s=4.0, refresh="all")
    tail = frames[4:]
    got = trained_scores(trainable, tail, np.zeros(sum(len(f.cells) for f in tail), np.int64), {8: 0}, grid)
    for kind in EVENT_KINDS:
        assert got[(8, kind)] == pytest.approx(wanted[(12, kind)], abs=2e-5)


def test_rows_see_their_context_and_nothing_else(trainable: TrainableModel, grid: PatchGrid) -> None:
    rng = np.random.default_rng(1)
    counts = [grid.tokens, 0, 5, 9, grid.tokens, 3, 7]
    every = np.argwhere(np.ones((grid.group_rows, grid.group_cols), bool))
    kept = [every[np.sort(rng.choice(len(every), n, replace=False))] for n in counts]
    frames = [FrameSpan(0.1 + i, i, torch.from_numpy(cells), grid) for i, cells in enumerate(kept)]
    frame_of = np.repeat(np.arange(len(counts)), counts)
    context = np.array([rng.integers(0, f + 1) for f in frame_of])
    asks = [
        SequenceQuestion(4, 7, [9, 9, 9]),
        SequenceQuestion(0, 3, [9, 9], [1]),
        SequenceQuestion(0, 3, [9, 9, 9, 9]),
        SequenceQuestion(2, 7, [9]),
    ]
    layout = lay_out_sequence(trainable, frames, context, asks)
    head, visual = len(layout.system), sum(counts)
    assert len(layout) == head + visual + 3 + 3 + 4 + 1
    assert [layout.asks[i] for i in range(4)] == [asks[i] for i in layout.order]
    assert [ask.end for ask in layout.asks] == [3, 3, 7, 7]

    sees = np.zeros((len(layout), len(layout)), bool)
    for block in layout.blocks:
        keys = np.concatenate([np.arange(a, b) for a, b in block.keys])
        assert block.bias.shape == (block.stop - block.start, len(keys))
        sees[np.ix_(np.arange(block.start, block.stop), keys)] = block.bias.numpy() == 0
    for row in range(len(layout)):
        for key in range(len(layout)):
            if row < head or key < head:
                wanted = key <= row and key < head
            elif row < head + visual:
                wanted = key <= row and frame_of[key - head] >= context[row - head]
            else:
                number = max(i for i, start in enumerate(layout.starts) if start <= row)
                ask, start = layout.asks[number], layout.starts[number]
                shown = key < head + visual
                wanted = ask.opening <= frame_of[key - head] < ask.end if shown else start <= key <= row
            assert sees[row, key] == wanted, (row, key)


def test_a_question_stands_as_far_from_its_windows_frames_as_in_a_window_of_its_own(
    trainable: TrainableModel, grid: PatchGrid
) -> None:
    every = np.argwhere(np.ones((grid.group_rows, grid.group_cols), bool))
    frames = [FrameSpan(0.3 + i, i, torch.from_numpy(every), grid) for i in range(9)]
    zeros = np.zeros(9 * len(every), np.int64)
    ask = SequenceQuestion(5, 9, [3, 4, 5])
    whole = lay_out_sequence(trainable, frames, zeros, [ask])
    alone = lay_out_sequence(trainable, frames[5:], zeros[: 4 * len(every)], [SequenceQuestion(0, 4, [3, 4, 5])])
    head = len(whole.system)
    frame = head + 5 * len(every)
    first = whole.positions[:, [frame]]
    assert torch.equal(
        whole.positions[:, whole.starts[0] :] - first,
        alone.positions[:, alone.starts[0] :] - alone.positions[:, [head]],
    )


def test_what_lies_outside_is_refused(trainable: TrainableModel, grid: PatchGrid) -> None:
    frames = [FrameSpan(float(i), i, torch.tensor([[0, 0]]), grid) for i in range(2)]
    with pytest.raises(ValueError, match="context"):
        lay_out_sequence(trainable, frames, np.array([0, 2]), [])
    with pytest.raises(ValueError, match="window"):
        lay_out_sequence(trainable, frames, np.array([0, 0]), [SequenceQuestion(1, 3, [5])])


def test_every_frame_travels_once(examples: list[Example], grid: PatchGrid) -> None:
    for example in examples:
        batches = patch_batches(example, grid)
        assert sum(len(batch.cells) for batch in batches) == len(example.context)
