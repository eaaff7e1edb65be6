"""A tiny model, and synthetic cameras for it."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.engine.native import NativeEngine
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.types import Answer, FrameSample, Question, StreamSpec

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def faster_interpreter() -> None:
    """At each launch of a kernel Triton's interpreter looks through its whole language for what to replace: a sixth of
    the time of these tests."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.language import core
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


@pytest.fixture(scope="session")
def model() -> VisionLanguageModel:
    return load_model("tiny-qwen2_5_vl", device=os.environ["SIGHTLINE_DEVICE"])


@pytest.fixture
def engine(model: VisionLanguageModel) -> NativeEngine:
    return NativeEngine(model, max_new_tokens=4)


@pytest.fixture
def make_camera(model: VisionLanguageModel) -> Callable[..., SyntheticCamera]:
    """One frame a second, an anchor every four, unless told otherwise."""

    def make(**options: Any) -> SyntheticCamera:
        standard: dict[str, Any] = {"stream": "cam", "width": 84, "height": 56, "anchor_every": 4, "fps": 2.0}
        return SyntheticCamera(geometry=model.geometry, **standard | options)

    return make


@pytest.fixture
def make_spec() -> Callable[..., StreamSpec]:
    """Windows of 8 s every 2 s."""

    def make(stream: str = "cam", **options: Any) -> StreamSpec:
        standard: dict[str, Any] = {
            "questions": (Question("q", "Is anyone climbing the fence?"),),
            "window_s": 8.0,
            "stride_s": 2.0,
            "static_gate": False,
        }
        return StreamSpec(stream, **standard | options)

    return make


@pytest.fixture
def run() -> Callable[..., list[Answer]]:
    """Push frames, step every window at once."""

    def drive(engine: NativeEngine, samples: list[FrameSample]) -> list[Answer]:
        return [answer for sample in samples for r in engine.push(sample) for answer in engine.step([r])]

    return drive
