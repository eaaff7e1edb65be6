"""Examples from other processes come in order, and errors come with them."""

import multiprocessing
from collections.abc import Iterator

import numpy as np
import pytest

from cluster.errors import SightlineError
from cluster.lab.training.example_loader import load_examples
from cluster.lab.training.examples import Example, TowerExamples


def failing(number: int) -> Example:
    if number == 1:
        raise ValueError("no such scene")
    return TowerExamples("tiny", 0, frames=1)(number)


def same(one: Example, other: Example) -> bool:
    return one.scene == other.scene and all(
        np.array_equal(a.patches, b.patches) and np.array_equal(a.cells, b.cells) and a.time_s == b.time_s
        for a, b in zip(one.frames, other.frames, strict=True)
    )


def test_two_processes_give_what_none_does_and_end_with_the_loader() -> None:
    make = TowerExamples("tiny", seed=1, frames=2)
    before = set(multiprocessing.active_children())
    with load_examples(make, workers=0, first=7) as alone, load_examples(make, workers=2, first=7) as several:
        for _ in range(5):
            assert same(next(alone), next(several))
        assert len(set(multiprocessing.active_children()) - before) == 2
    assert set(multiprocessing.active_children()) <= before


def test_what_went_wrong_there_is_told_here() -> None:
    with load_examples(failing, workers=1) as feeder:
        next(feeder)
        with pytest.raises(SightlineError, match=r"example 1 could not be made[\s\S]*no such scene"):
            next(feeder)


def test_a_process_that_is_gone_is_an_error() -> None:
    before = set(multiprocessing.active_children())
    with load_examples(TowerExamples("tiny", 0, frames=1), workers=1) as feeder:
        next(feeder)
        (process,) = set(multiprocessing.active_children()) - before
        process.kill()
        with pytest.raises(SightlineError, match=r"DataLoader worker .* (exited unexpectedly|killed by signal)"):
            _drain(feeder)


def _drain(feeder: Iterator[Example]) -> None:
    """More than can lie in the queue."""
    for _ in range(50):
        next(feeder)
