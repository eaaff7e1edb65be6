"""A tiny engine, a short real clip, and results whose every number is known."""

from pathlib import Path

import pytest
import torch

from cluster.engine.native.engine import NativeEngine
from cluster.lab.evaluation.datasets import LabelledVideo
from cluster.lab.evaluation.results import Results, VideoRun, WindowResult
from cluster.lab.evaluation.settings import Setting
from cluster.lab.scenes.street_clips import make_clip
from cluster.models.loading import load_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_engine():
    return NativeEngine(load_model("tiny-qwen2_5_vl"))


@pytest.fixture(scope="session")
def street(tmp_path_factory) -> LabelledVideo:
    """Twelve seconds; a person from 2 s to 9 s."""
    path = tmp_path_factory.mktemp("street") / "street.mp4"
    make_clip("street", path, seconds=12, fps=10, size=(256, 144))
    return LabelledVideo(path, "street", (("person", 2.0, 9.0),), ("person", "car"), frozenset({"night"}), 0.5)


@pytest.fixture(scope="session")
def make_run():
    """``make_run(scores, flops)``: a run of one kind, "fall", windows of 20 s every 4 s."""

    def make(scores, flops=100, kinds=("fall",)):
        windows = tuple(
            WindowResult(
                4.0 * i, 20.0 + 4.0 * i, (score,) * len(kinds), 100, 60, 10, 20, 5, flops // 4, flops * 3 // 4, 0.1
            )
            for i, score in enumerate(scores)
        )
        return VideoRun(kinds, windows, 0.1, 2.0)

    return make


@pytest.fixture(scope="session")
def make_results(make_run):
    """``make_results(truth, table, flops)``: per video whether it holds a fall; per setting the videos' scores."""

    def make(truth, table: dict[Setting, list[float]], flops: dict[Setting, int], strata=None):
        event, groups = (("fall", 2.0, 38.0),), strata or {}
        videos = tuple(
            LabelledVideo(Path(f"{i}.mp4"), f"v{i}", event if held else (), ("fall",), groups.get(i, frozenset()))
            for i, held in enumerate(truth)
        )
        runs = {
            (video.name, setting.key): make_run([score, score, 0.0], flops[setting])
            for setting, scores in table.items()
            for video, score in zip(videos, scores, strict=True)
        }
        return Results(videos, tuple(table), runs)

    return make
