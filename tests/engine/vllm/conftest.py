"""Engines over tiny models, one vLLM of each family for all tests, one after the other."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS
from cluster.registry import families
from cluster.types import Answer, FrameSample, Question, StreamSpec

torch.set_num_threads(1)

FIRST = "qwen2_5_vl"
FAMILIES = (FIRST, *(name for name in families if name != FIRST))
QUESTIONS = (Question("q", "Is anyone climbing the fence?"), Question("why", "Is a car moving?", explain=True))


class Family:
    """A model, and both engines over it."""

    questions = QUESTIONS

    def __init__(self, name: str) -> None:
        from cluster.engine.native import NativeEngine
        from cluster.engine.vllm.engine import VllmEngine
        from cluster.engine.vllm.settings import VllmSettings

        self.model: VisionLanguageModel = load_model(name)
        settings = VllmSettings({"max_model_len": 4096, "kv_cache_memory_bytes": 2**27}, timeout_s=30)
        # Another copy, of which nothing is left but the tower and the embeddings.
        self.engine = VllmEngine(load_model(name), settings=settings, max_new_tokens=4, release=True)
        self.native = NativeEngine(self.model, max_new_tokens=4)

    def camera(self, stream: str, **options: Any) -> SyntheticCamera:
        """One frame a second, an anchor every four, unless told otherwise."""
        standard: dict[str, Any] = {"width": 84, "height": 56, "anchor_every": 4}
        standard["fps"] = float(self.model.geometry.temporal)
        return SyntheticCamera(stream, self.model.geometry, **standard | options)

    def frames(self, count: int, stream: str = "cam", **options: Any) -> list[FrameSample]:
        """The first frames of a camera."""
        return list(islice(self.camera(stream, **options), count))

    @staticmethod
    def drive(engine: Any, spec: StreamSpec, samples: list[FrameSample]) -> list[Answer]:
        """Admit, push, step every window at once, evict."""
        engine.admit(spec)
        answers = [answer for sample in samples for r in engine.push(sample) for answer in engine.step([r])]
        engine.evict(spec.stream)
        return answers


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with ``family`` run over all, those with ``qwen`` over the first. Few machines hold an engine of each, so
    that tests of one family run in a row."""
    if "engines" in metafunc.fixturenames:
        names = (FIRST,) if "qwen" in metafunc.fixturenames else FAMILIES
        metafunc.parametrize("engines", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> Iterator[Family]:
    (name,) = (name for name, preset in PRESETS.items() if preset.family == request.param and name.startswith("tiny-"))
    family = Family(name)
    yield family
    family.engine.close()


@pytest.fixture
def family(engines: Family) -> Family:
    return engines


@pytest.fixture
def qwen(engines: Family) -> Family:
    return engines


@pytest.fixture
def spec() -> Callable[..., StreamSpec]:
    """Windows of 8 s every 2 s that the native engine computes as a whole, as vLLM does."""

    def make(stream: str = "cam", **options: Any) -> StreamSpec:
        standard: dict[str, Any] = {"questions": QUESTIONS, "window_s": 8.0, "stride_s": 2.0, "refresh": "all"}
        return StreamSpec(stream, **{"static_gate": False, **standard, **options})

    return make
