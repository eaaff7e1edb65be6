"""Windows cut into passes: bounded, and the same as in one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.engine.native import NativeEngine, passes
from cluster.engine.native.forward import PassResult, StreamPass
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.base import VisionLanguageModel
from cluster.types import Question, StreamSpec

QUESTIONS = (Question("q", "Is anyone climbing the fence?"), Question("r", "Is there a fire or smoke?"))
REFRESH = ("all", "anchors", "random", "topk_deviation")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[StreamPass]]:
    """The passes that ran."""
    seen: list[list[StreamPass]] = []
    forward = passes.ragged_forward

    def recorded(model: VisionLanguageModel, works: list[StreamPass], kernel: Any) -> list[PassResult]:
        seen.append(works)
        return forward(model, works, kernel)

    monkeypatch.setattr(passes, "ragged_forward", recorded)
    return seen


@pytest.mark.parametrize("rows", [18, 7])
def test_pieces_give_what_one_pass_gives(
    model: VisionLanguageModel,
    make_camera: Callable[..., SyntheticCamera],
    make_spec: Callable[..., StreamSpec],
    calls: list[list[StreamPass]],
    rows: int,
) -> None:
    """Every policy at once, window after window: what a piece leaves in the pool is what the next ones build on."""
    cameras = [make_camera(stream=name, kept=0.5, seed=i, anchor_every=2) for i, name in enumerate(REFRESH)]
    whole, cut = NativeEngine(model), NativeEngine(model)
    whole.pass_rows, cut.pass_rows = 16384, rows
    for engine in (whole, cut):
        for name in REFRESH:
            engine.admit(make_spec(name, refresh=name, questions=QUESTIONS))
    steps = most = 0
    for index in range(16):
        requests = [[r for camera in cameras for r in engine.push(camera.sample(index))] for engine in (whole, cut)]
        if not requests[0]:
            continue
        steps += 1
        expected = whole.step(requests[0])
        assert len(calls) == 1
        calls.clear()
        got = cut.step(requests[1])
        most = max(most, len(calls))
        for works in calls:
            total = sum(len(work.embeds) for work in works)
            assert total <= rows or (len(works) == 1 and (len(works[0].slots) <= rows or works[0].narrowing))
            assert len({int(work.table[0]) for work in works}) == len(works)
        calls.clear()
        for a, b in zip(expected, got, strict=True):
            assert (a.stream, a.question, a.tokens) == (b.stream, b.question, b.tokens)
            assert b.score == pytest.approx(a.score, abs=1e-5)
        for first, second in zip(whole.stats.windows, cut.stats.windows, strict=True):
            assert (first.computed, first.attended) == (second.computed, second.attended)
    assert steps == 8
    # More than one a stream: windows were cut.
    assert most > len(REFRESH)


def test_small_windows_share_a_pass(
    model: VisionLanguageModel,
    make_camera: Callable[..., SyntheticCamera],
    make_spec: Callable[..., StreamSpec],
    calls: list[list[StreamPass]],
) -> None:
    engine = NativeEngine(model)
    assert engine.pass_rows == passes.CPU_ROWS == passes.pass_rows(torch.device("cpu"))
    assert passes.pass_rows(torch.device("cuda")) == passes.ROWS
    cameras = [make_camera(stream=f"cam{i}", seed=i) for i in range(5)]
    for camera in cameras:
        engine.admit(make_spec(camera.stream))
    requests = [r for index in range(2) for camera in cameras for r in engine.push(camera.sample(index))]
    assert len(engine.step(requests)) == 5
    assert [len(works) for works in calls] == [5]
