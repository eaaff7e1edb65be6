"""Explanations under graphs: on a CPU a trace of operations stands in for the graph, and Python does not run again."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cluster.engine.native import NativeEngine, explanations, graphed_decode
from cluster.engine.native import engine as native_engine
from cluster.engine.native.graphed_decode import DecodeStep
from cluster.engine.native.kernels.slots import SlotsKernel
from cluster.engine.window.planner import Run
from cluster.engine.window.score import why_ids
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model, load_truncated
from cluster.models.presets import PRESETS
from cluster.types import Question

QUESTIONS = tuple(
    Question(text, text, explain=True)
    for text in ("Is anyone climbing the fence?", "Is there a fire or smoke?", "Did a vehicle stop on the road?")
)
PLAIN = Question("plain", "Is a door open?")


class Trace:
    """In place of a capture: operations with the addresses and numbers of their first run."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        graph = make_fx(function)()
        return lambda: graph()


@pytest.fixture
def model(request, monkeypatch) -> VisionLanguageModel:
    """Of two layers and two heads, asking why in three tokens, of which a pass takes those of three explanations: each
    row that a graph has takes long in Triton's interpreter."""
    name = getattr(request, "param", "tiny-qwen2_5_vl")
    preset = PRESETS[name]
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(PRESETS, name, replace(preset, text=preset.text | small))
    monkeypatch.setattr(native_engine, "why_ids", lambda model: why_ids(model)[-3:])
    monkeypatch.setattr(explanations, "LARGEST", 12)
    return load_model(name)


@pytest.fixture
def explain(make_camera, make_spec):
    """Answers of two cameras' windows, stepped together, and how many explanations each step of decoding went on with.
    A sixth of all tokens ends one, so that they end one by one."""

    def answers(engine: NativeEngine) -> tuple[list[tuple[str, str, str]], list[int]]:
        engine._ends = frozenset(range(0, engine.model.text_config.vocab_size, 6))
        rows: list[int] = []
        decode = engine.decode

        def recorded(step):
            rows.append(len(step.ids))
            return decode(step)

        engine.decode = recorded
        cameras = [make_camera(stream=name) for name in ("a", "b")]
        for camera, questions in zip(cameras, ((*QUESTIONS, PLAIN), QUESTIONS[:2]), strict=True):
            engine.admit(make_spec(camera.stream, questions=questions))
        given = []
        for index in range(4):
            requests = [request for camera in cameras for request in engine.push(camera.sample(index))]
            given += engine.step(requests) if requests else []
        return [(answer.stream, answer.question, answer.text) for answer in given], rows

    return answers


def eager_engine(model: VisionLanguageModel) -> NativeEngine:
    return NativeEngine(model, max_new_tokens=4)


def graphed_engine(model: VisionLanguageModel, capture: graphed_decode.Capture) -> NativeEngine:
    """As on a GPU; only decoding runs the GPU's kernel, which takes long in Triton's interpreter."""
    engine = eager_engine(model)
    engine.decode.kernel, engine.decode.capture = SlotsKernel(), capture
    return engine


def bucket(rows: int) -> int:
    return next(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size >= rows)


@pytest.mark.parametrize("model", ["tiny-qwen2_5_vl", "tiny-internvl3"], indirect=True)
def test_tokens_and_kv_are_those_of_eager_decoding(model, explain) -> None:
    """Of another kernel. Rows are padded, and fewer explanations need smaller graphs."""
    eager, capture = eager_engine(model), Trace()
    graphed = graphed_engine(model, capture)
    decode = graphed.decode
    expected, rows = explain(eager)
    assert explain(graphed) == (expected, rows)
    assert {each == bucket(each) for each in rows} == {True, False}
    assert capture.captured == len({bucket(each) for each in rows}) > 1
    assert (decode.replayed, decode.eager) == (len(rows), 0)
    # Slots are taken in one order: padding has written nothing else.
    for got, wanted in ((graphed.pool.k, eager.pool.k), (graphed.pool.v, eager.pool.v)):
        torch.testing.assert_close(got[:, :2000], wanted[:, :2000], atol=1e-4, rtol=1e-4)
    assert graphed.pool._fresh == eager.pool._fresh < 2000


@pytest.mark.parametrize("good", [0, 1])
def test_a_failed_capture_is_told_once_and_costs_graphs_alone(model, explain, caplog, good) -> None:
    """The first one fails, or the second, after which the first is gone too."""
    trace = Trace()

    def capture(function):
        if trace.captured == good:
            function()
            raise RuntimeError("operation not permitted when stream is capturing")
        return trace(function)

    engine = graphed_engine(model, capture)
    decode = engine.decode
    with caplog.at_level(logging.ERROR):
        got, rows = explain(engine)
    assert got == explain(eager_engine(model))[0]
    before = next(i for i, each in enumerate(rows) if bucket(each) != bucket(rows[0])) if good else 0
    assert (decode.replayed, decode.eager) == (before, len(rows) - before)
    assert len(caplog.records) == 1
    assert "without CUDA graphs from now on" in caplog.text
    assert not decode._graphs


def test_more_explanations_than_the_largest_graph_has_rows_are_decoded_eagerly(model, explain, monkeypatch) -> None:
    monkeypatch.setattr(graphed_decode, "LARGEST", 4)
    engine = graphed_engine(model, Trace())
    decode = engine.decode
    got, rows = explain(engine)
    assert got == explain(eager_engine(model))[0]
    assert decode.eager == sum(each > 4 for each in rows) > 0
    assert decode.replayed == len(rows) - decode.eager > 0


def test_without_a_gpu_or_with_a_kernel_of_changing_launches_nothing_is_captured(model, explain) -> None:
    plain, other, capture = eager_engine(model), eager_engine(model), Trace()
    other.decode.capture = capture
    assert plain.decode.capture is None
    for engine in (plain, other):
        decode = engine.decode
        _, rows = explain(engine)
        assert (decode.replayed, decode.eager) == (0, len(rows))
    assert capture.captured == 0


@pytest.fixture
def noted(monkeypatch) -> list[str]:
    """No GPU is here: queues and graphs note what is done. ``fails`` in it: so does the end of the next capture."""
    log: list[str] = []

    class Queue:
        def __init__(self) -> None:
            self.name = f"queue {sum(each.startswith('new') for each in log)}"
            log.append(f"new {self.name}")

        def wait_stream(self, other: "Queue") -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def inside(queue: Queue):
        log.append(f"in {queue.name}")
        try:
            yield
        finally:
            log.append("out")

    @contextlib.contextmanager
    def graph(graph, pool: str, capture_error_mode: str):
        log.append(f"a graph of the {pool}")
        yield
        if "fails" in log:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "Stream", Queue)
    main = Queue()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: log.append("replayed")))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: log.append(f"ended {given}"))
    return log


WARM_UP = ["queue 1 waits for queue 0", "in queue 1", "computed", "computed", "out", "queue 0 waits for queue 1"]


def test_all_captures_warm_up_in_one_queue(noted) -> None:
    """cuBLAS keeps memory for each queue that it was called in."""
    capture = graphed_decode.CudaCapture()
    for _ in range(2):
        noted.clear()
        capture(lambda: noted.append("computed"))()
        assert noted == [*WARM_UP, "in queue 0", "a graph of the pool", "computed", "out", "replayed"]


def test_a_failed_capture_leaves_neither_its_queue_nor_its_memory_current(noted) -> None:
    """As torch does where the end of a capture fails: what follows would run beside what others wait for, and uploads
    would take ever more memory."""
    capture = graphed_decode.CudaCapture()
    noted[:] = ["fails"]
    with pytest.raises(RuntimeError, match="a previous error during capture"):
        capture(lambda: noted.append("computed"))
    assert noted == ["fails", *WARM_UP, "in queue 0", "a graph of the pool", "computed", "out", "ended (0, 'pool')"]


def test_a_block_that_pads_computes_nothing() -> None:
    """Of fewer streams than rows: what is left of an earlier step is not visited."""
    kernel = SlotsKernel()
    tables = [np.array([3, 1, 4]), np.array([5, 9])]
    inputs = kernel.static_inputs(2, 16, torch.device("cpu"))
    kernel.fill(inputs, tables, [[Run(0, 1, 1, 2, 3)], [Run(1, 1, 2, 2, 2)]])
    assert inputs.table.tolist() == [3, 1, 4, 5, 9, *[0] * 11]
    assert inputs.blocks.tolist() == [[0, 1, 0, 1, 1, 2, 3], [1, 1, 3, 2, 2, 0, 0]]
    assert inputs.rows.tolist() == [[1, 2, 3], [2, 0, 0]]
    addresses = [part.data_ptr() for part in (inputs.table, inputs.blocks, inputs.rows)]
    kernel.fill(inputs, tables[:1], [[Run(0, 1, 1, 2, 3), Run(1, 1, 1, 2, 3)]])
    assert inputs.blocks.tolist() == [[0, 2, 0, 1, 1, 2, 3], [0] * 7]
    assert inputs.rows.tolist() == [[1, 2, 3]] * 2
    assert addresses == [part.data_ptr() for part in (inputs.table, inputs.blocks, inputs.rows)]


def test_a_step_of_decoding_is_written_in_two_copies(make_camera, make_spec, run) -> None:
    """Of the rows, and of what the kernel reads beside them."""
    with FakeCuda() as cuda:
        engine = NativeEngine(load_truncated("qwen2_5_vl-7b", 1, DEVICE), kv_bytes=2**24, max_new_tokens=3)
        engine.decode.capture = cuda.capture
        engine._ends = frozenset()
        engine.admit(make_spec(questions=QUESTIONS[:2]))
        run(engine, [make_camera().sample(index) for index in range(2)])
        # Of the turn that asks why, and of one row of each.
        _, graph = engine.decode._graphs.values()
        step = DecodeStep(
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(3, 2, dtype=torch.int64),
            np.zeros(2, np.int64),
            [np.zeros(4, np.int64)],
            [[Run(0, 2, 1, 2, 4)]],
        )
        cuda.reset()
        with torch.inference_mode():
            graph._fill(step)
        assert cuda.launches == {"aten.copy_": 2}
        assert cuda.syncs == 0
