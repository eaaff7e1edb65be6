"""Examples shown again, and examples seen by a frozen tower."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.lab.training.example_loader import FrozenTowerExamples, encode_example, replayed, save_tower
from cluster.lab.training.examples import Example, WindowExamples
from cluster.lab.training.loss import DenseHeads, margins, window_loss


def drawn(again: int, count: int, seed: int = 0) -> list[int]:
    numbers = replayed(itertools.count(), again=again, seed=seed)  # type: ignore[arg-type]
    return list(itertools.islice(numbers, count))  # type: ignore[arg-type]


def test_without_replays_every_example_is_new() -> None:
    assert drawn(0, 200) == list(range(200))


def test_each_new_example_is_followed_by_earlier_ones() -> None:
    given = drawn(2, 400)
    new = [
        value for place, value in enumerate(given) if value == max(given[: place + 1]) and value not in given[:place]
    ]
    assert new == list(range(len(new)))
    # All new at first, a third of the rest.
    assert len(new) == pytest.approx(64 + (400 - 64) / 3, abs=2)
    assert given == drawn(2, 400)
    assert given != drawn(2, 400, seed=1)


def test_a_frozen_towers_tokens_answer_like_the_pictures(trainable, grid, examples: list[Example]) -> None:
    ready = encode_example(trainable, examples[1], grid)
    assert ready.visual_tokens is not None
    assert all(len(frame.patches) == 0 for frame in ready.frames)
    assert len(ready.visual_tokens) == sum(len(frame.cells) for frame in ready.frames)
    plain, seen = margins(trainable, [examples[1]], grid)[0], margins(trainable, [ready], grid)[0]
    torch.testing.assert_close(seen, plain, atol=2e-2, rtol=2e-2)
    # Both kinds in one batch, in their order.
    both = margins(trainable, [ready, examples[2]], grid)[0]
    torch.testing.assert_close(both[: len(seen)], seen, atol=1e-4, rtol=1e-4)


def test_the_process_that_renders_uses_the_towers_file(trainable, grid, tmp_path: Path) -> None:
    save_tower(trainable, tmp_path / "run" / "tower.pt")
    make = FrozenTowerExamples(WindowExamples("tiny", seed=5), str(tmp_path / "run" / "tower.pt"), "tiny")
    made, wanted = make(3), encode_example(trainable, WindowExamples("tiny", seed=5)(3), grid)
    assert made.visual_tokens is not None
    assert wanted.visual_tokens is not None
    # One of them in bfloat16 where that is fast.
    np.testing.assert_allclose(made.visual_tokens.astype(float), wanted.visual_tokens.astype(float), atol=0.1, rtol=0.1)
    assert np.corrcoef(made.visual_tokens.ravel(), wanted.visual_tokens.ravel())[0, 1] > 0.999


def test_only_the_language_model_learns_from_seen_tokens(trainable, grid, examples: list[Example]) -> None:
    ready = encode_example(trainable, replace(examples[0]), grid)
    loss = window_loss(trainable, DenseHeads(trainable.text_config.hidden_size), [ready], grid, train_tower=False)
    loss.total.backward()
    assert all(parameter.grad is None for parameter in trainable._visual.parameters())
    assert any(parameter.grad is not None for parameter in trainable.layers[0].parameters())
