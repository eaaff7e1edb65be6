"""Host cost of a step: Python and dispatch time of production's own step, without its arithmetic.

Tensors on the ``meta`` device have shapes and no data, so that operations are dispatched to their shape functions at a
model's true depth and width. For its compiler, torch overrides its C++ shape functions (2 us, like dispatch to a CPU or
GPU) with Python ones that take up to 700 us. A separate process removes these and measures planning, Python code of
engine and layers, and dispatch, but not the driver's part of a launch. Times are one thread's CPU time, which other
load affects only through caches and clock rate; each step's minimum of five runs counts.
"""

import functools
import gc
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cluster.engine.base import Engine
from cluster.engine.native import NativeEngine
from cluster.hosts import end_with_parent
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.models.loading import load_shape
from cluster.types import MICROSECONDS, FrameSample, PatchGeometry, Question, StreamSpec, WindowRequest

RUNS = 5
WINDOW_S, STRIDE_S = 40.0, 8.0
QUESTION = Question("fire", "Is there a fire?")
SPEC = StreamSpec("camera", (QUESTION,), WINDOW_S, STRIDE_S, static_gate=False)


@dataclass(frozen=True, slots=True)
class HostCost:
    """Thread milliseconds per window. ``step``: windows computed at their end; ``end`` and ``ahead``: at a window's end
    and before it when frames are computed as they arrive."""

    step: float
    end: float
    ahead: float


def admit_cameras(engine: Engine, spec: StreamSpec, count: int, **options: Any) -> list[StreamSpec]:
    """Admit ``count`` identical cameras; returns their specs."""
    specs = [replace(spec, stream=f"camera-{number}", **options) for number in range(count)]
    for each in specs:
        engine.admit(each)
    return specs


def push_all(engine: Engine, specs: Sequence[StreamSpec], sample: FrameSample) -> list[WindowRequest]:
    """Push a frame to every camera; returns the windows that closed."""
    return [request for spec in specs for request in engine.push(replace(sample, stream=spec.stream))]


@functools.cache
def camera_samples(geometry: PatchGeometry, still: bool = False) -> list[FrameSample]:
    """Frames of a camera that keeps a quarter of its tokens between anchors, or none if ``still``."""
    seconds = WINDOW_S + 2 * STRIDE_S
    camera = SyntheticCamera("camera", geometry, width=448, height=448, fps=2.0, still=still)
    return list(itertools.takewhile(lambda sample: sample.pts < seconds * MICROSECONDS, camera))


def host_cost(shape: str, streams: int) -> HostCost:
    """Host cost of steps of ``streams`` cameras with full-length windows. ``shape``: of a published model. Raises
    ``ModelError`` if unknown."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as process:
        return process.submit(_host_cost, shape, streams).result()


def _host_cost(shape: str, streams: int) -> HostCost:
    torch.set_num_threads(1)
    _restore_shape_functions()
    model = load_shape(shape)
    model.model.to(torch.bfloat16)
    _reuse_upload_memory(model)
    samples = camera_samples(model.geometry)
    # Like a replica after loading its model.
    gc.freeze()
    with mock.patch.object(Tensor, "tolist", _meta_as_zeros):
        step, _ = _fastest(model, replace(SPEC, patient=True), samples, streams)
        end, ahead = _fastest(model, SPEC, samples, streams)
    # Otherwise triton's bindings report every frozen object as a leak at exit.
    gc.unfreeze()
    return HostCost(step, end, ahead)


def _fastest(
    model: VisionLanguageModel, spec: StreamSpec, samples: Sequence[FrameSample], streams: int
) -> tuple[float, float]:
    """Milliseconds per window of ``step`` and of work ahead: median over steps of the minimum of ``RUNS`` runs."""
    runs = [_drive(model, spec, samples, streams) for _ in range(RUNS)]
    steps, aheads = (zip(*times, strict=True) for times in zip(*runs, strict=True))
    return 1e3 * statistics.median(map(min, steps)) / streams, 1e3 * statistics.median(map(min, aheads)) / streams


def _drive(
    model: VisionLanguageModel, spec: StreamSpec, samples: Sequence[FrameSample], streams: int
) -> tuple[list[float], list[float]]:
    """Seconds of each ``step``, and of the work ahead of it."""
    engine = NativeEngine(model, kernel="slots", kv_bytes=2**37)
    specs = admit_cameras(engine, spec, streams)
    steps: list[float] = []
    aheads: list[float] = []
    ahead = 0.0
    for sample in samples:
        requests = push_all(engine, specs, sample)
        began = time.thread_time()
        if requests:
            engine.step(requests)
            if requests[0].start > samples[0].pts:
                steps.append(time.thread_time() - began)
                aheads.append(ahead)
            began, ahead = time.thread_time(), 0.0
        while not spec.patient and engine.prefill_ahead():
            pass
        ahead += time.thread_time() - began
    return steps, aheads


_to_list = Tensor.tolist


def _meta_as_zeros(tensor: Tensor) -> Any:
    """``Tensor.tolist``, which the host calls once per step, with zeros for ``meta`` tensors."""
    return _to_list(torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)


def _reuse_upload_memory(model: VisionLanguageModel) -> None:
    """Gather patches in preallocated buffers, like the pinned memory used with a GPU."""
    buffers: dict[torch.Size, Tensor] = {}

    def upload(frames: Sequence[PatchBatch]) -> Tensor:
        parts = [frame.patches for frame in frames]
        count, shape = sum(map(len, parts)), parts[0].shape[1:]
        if shape not in buffers or len(buffers[shape]) < count:
            buffers[shape] = torch.zeros(count, *shape, dtype=torch.uint8)
        return torch.cat(parts, out=buffers[shape][:count]).to(model.device)

    model._upload = upload  # type: ignore[method-assign]


def _restore_shape_functions() -> None:
    """Restore torch's C++ shape functions in this process; Python ones only where C++ has none."""
    from torch import _decomp, _meta_registrations

    registered: Any = _meta_registrations._meta_lib_dont_use_me_use_register_meta
    registered._destroy()
    # One launch on a GPU; on ``meta`` it would be decomposed.
    torch.nn.functional.rms_norm = _rms_norm  # type: ignore[assignment]
    for name, function in _SHAPES.items():
        _LIBRARY.impl(name, function)
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    for table in ("meta", "post_autograd", "pre_autograd"):
        for op, function in _decomp.global_decomposition_table[table].items():
            if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or op.is_view:
                continue
            name = str(op._schema.name) + (f".{op._overloadname}" if op._overloadname != "default" else "")
            if not has(name, "Meta") and not has(name, "CompositeImplicitAutograd"):
                _LIBRARY.impl(op, function)


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = list(x.shape)
    shape[dim] = len(index)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _to_copy(x: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device=device or x.device)


def _layer_norm(x: Tensor, shape: Sequence[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*x.shape[: -len(shape)], *[1] * len(shape))
    out, mean, rstd = (torch.empty(size, dtype=x.dtype, device=x.device) for size in (x.shape, rows, rows))
    return out, mean, rstd


def _rms_norm(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:  # noqa: ARG001
    return torch.empty([size for axis, size in enumerate(x.shape) if axis not in dim], dtype=x.dtype, device=x.device)


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:  # noqa: ARG001
    for target, source in zip(targets, sources, strict=True):
        if target.shape != source.shape:
            raise RuntimeError(f"{tuple(source.shape)} does not fit {tuple(target.shape)}")


# Registrations last as long as this object.
_LIBRARY: Any = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
# Shape functions of frequent operations that have none in C++.
_SHAPES = {
    "index_select": _index_select,
    "_to_copy": _to_copy,
    "empty_like": _to_copy,
    "native_layer_norm": _layer_norm,
    "logsumexp": _logsumexp,
    "_foreach_copy_": _copy_each,
}
