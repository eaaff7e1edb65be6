"""A GPU of any size without one: tensors on ``cuda:0`` have shapes, dtypes and devices, but no memory.

Production code runs unchanged inside :class:`FakeCuda`. Operations that mix devices raise as they do on a GPU; kernel
launches, host reads and written keys are counted. Floats that the host reads are random, integers zero.

torch's ``FakeTensorMode`` alone would fake host tensors too, which numpy planning code needs, and torch builds without
CUDA cannot index fake CUDA tensors; both are worked around here.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Self
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda:0")

_aten = torch.ops.aten
_PACKAGE = str(Path(__file__).parents[2])
# Views and allocations, which launch no kernel.
_VIEWS = """
_reshape_alias alias as_strided detach empty empty_like empty_strided expand lift_fresh narrow new_empty
new_empty_strided permute select slice split split_with_sizes squeeze t transpose unbind unsqueeze view
"""
_FREE = frozenset(f"aten.{name}" for name in _VIEWS.split())
# A single kernel on a GPU, although torch can also decompose it.
_FUSED = "aten.rms_norm"
# The Python bindings of these need a real device.
_DIRECT = {Tensor.copy_: _aten.copy_, Tensor.__invert__: _aten.bitwise_not, Tensor.contiguous: _aten.contiguous}
_READS = (Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__)


class FakeCuda:
    """Context in which ``cuda:0`` exists.

    Attributes:
        launches: kernel launches by operation.
        reads: host reads of device data, by source line of this package.
        watch: ``(key heads, head size)`` of keys and values whose writes are counted in ``written``, in slots of all
            key heads.
        current: the active context, if any.
    """

    current: ClassVar[FakeCuda | None] = None

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.watch: tuple[int, int] | None = None
        self.written = 0
        self._capturing = False
        self._fake = _FakeMode(allow_non_fake_inputs=True)
        self._lock = threading.RLock()
        self._exit_stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        run, stack = threading.Thread.run, self._exit_stack

        def with_device(thread: threading.Thread) -> None:
            with _Dispatch(self), _Functions(self):
                run(thread)

        # Modes are thread-local: install them in threads started inside the context, too.
        stack.enter_context(mock.patch.object(threading.Thread, "run", with_device))
        # FakeTensor's own reads element by element, unlike on a GPU.
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", Tensor.tolist))
        stack.enter_context(_Dispatch(self))
        stack.enter_context(_Functions(self))
        stack.enter_context(mock.patch.object(FakeCuda, "current", self))
        return self

    def __exit__(self, *error: object) -> None:
        self._exit_stack.close()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Stand-in for CUDA graph capture: runs the function once and returns it. Raises ``RuntimeError`` if it reads
        device data or passes host data to the device, as a capture on a GPU does."""
        self._capturing = True
        try:
            function()
        finally:
            self._capturing = False
        return function

    def reset(self) -> None:
        """Reset the counters."""
        self.launches.clear()
        self.reads.clear()
        self.written = 0

    @property
    def syncs(self) -> int:
        """Number of host reads; reading a whole tensor counts once."""
        return sum(self.reads.values())

    def read(self, tensor: Tensor) -> Tensor:
        """Record a host read of a device tensor; returns its stand-in data."""
        if self._capturing:
            raise RuntimeError("the host reads device data during a capture")
        frame: Any = sys._getframe()
        while frame.f_back is not None and (
            not frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_filename == __file__
        ):
            frame = frame.f_back
        self.reads[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1
        if tensor.is_floating_point():
            return torch.rand(tensor.shape, dtype=torch.float32).to(tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation on fake device tensors."""

        def fake(part: Any) -> Any:
            real = isinstance(part, Tensor) and not isinstance(part, FakeTensor)
            # Scalars are passed as kernel arguments.
            if real and part.ndim and self._capturing:
                raise RuntimeError("host data is passed to the device during a capture")
            return self._fake.from_tensor(part) if real else part

        with self._lock:
            args, kwargs = tree_map(fake, (args, kwargs))
            with self._fake:
                return func(*args, **kwargs)

    def count(self, name: str, args: Any, result: Any) -> None:
        """Count a kernel launch and the watched slots that it wrote."""
        self.launches[name] += 1
        if self.watch is None:
            return
        # Writes into a pool count the indexed slots; other results count all their slots, in either layout.
        if name == "aten.index_copy_":
            self.written += len(args[2]) * (args[0].shape[0] if args[0].ndim == 4 else 1)
            return
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.ndim >= 3:
                *layers, a, b, size = tensor.shape
                for heads, slots in ((a, b), (b, a)):
                    if (heads, size) == self.watch:
                        self.written += slots * prod(layers)
                        break


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes ``in_kernel_invocation``, during which tensors report ``meta`` as their device, thread-local."""

    def __init__(self, *, allow_non_fake_inputs: bool) -> None:
        self._thread = threading.local()
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)

    @property
    def in_kernel_invocation(self) -> bool:
        return getattr(self._thread, "inside", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, inside: bool) -> None:
        self._thread.inside = inside


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on ``cuda`` with fake tensors, and all others on the host."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        fakes = [each for each in leaves if isinstance(each, FakeTensor)]
        name = str(func).rpartition(".")[0]
        if not fakes and not any(map(_is_cuda, leaves)):
            return func(*args, **kwargs)
        if name == "aten._local_scalar_dense":
            return self._cuda.read(args[0]).item()
        if name == "aten._to_copy" and fakes and torch.device(kwargs.get("device") or DEVICE).type == "cpu":
            return self._cuda.read(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key
        if name.startswith("aten.") and name != _FUSED and composite(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        if name in ("aten.nonzero", "aten.masked_select") or (name == "aten.index" and _by_mask(args[1])):
            self._cuda.read(args[0])
        result = self._cuda.run(func, args, kwargs)
        if name not in _FREE and not name.startswith("prim."):
            self._cuda.count(name, args, result)
        return result


class _Functions(TorchFunctionMode):
    """Intercepts Python-level calls that never reach a dispatch mode, or only with CUDA."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, FakeTensor) for each in args[:3]):
            if func is Tensor.__getitem__:
                return _getitem(*args)
            if func is Tensor.__setitem__:
                return _setitem(*args)
            if func in _DIRECT:
                return _DIRECT[func](*args, **kwargs)
            if func is Tensor.cpu:
                return self._cuda.read(args[0])
            if func in _READS:
                return func(self._cuda.read(args[0]), *args[1:], **kwargs)
        if any(map(_is_cuda, (*args, *kwargs.values()))):
            return self._cuda.run(func, args, kwargs)
        return func(*args, **kwargs)


def _is_cuda(part: Any) -> bool:
    return (isinstance(part, torch.device) and part.type == "cuda") or (
        isinstance(part, str) and part.startswith("cuda")
    )


def _by_mask(index: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in index)


def _expand_index(tensor: Tensor, index: Any) -> list[Any]:
    """The index as a list, with its ellipsis expanded."""
    parts = list(index) if isinstance(index, tuple) else [index]
    for place, part in enumerate(parts):
        if part is Ellipsis:
            named = sum(
                part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1
                for part in parts
                if part is not None and part is not Ellipsis
            )
            return [*parts[:place], *[slice(None)] * (tensor.ndim - named), *parts[place + 1 :]]
    return parts


def _getitem(tensor: Tensor, index: Any) -> Tensor:
    """``tensor[index]``."""
    dim = 0
    picked: list[Tensor | None] = []
    for part in _expand_index(tensor, index):
        if part is None:
            tensor = _aten.unsqueeze(tensor, dim)
        elif isinstance(part, slice):
            start, stop, step = part.indices(tensor.shape[dim])
            if (start, stop, step) != (0, tensor.shape[dim], 1):
                tensor = _aten.slice(tensor, dim, start, max(start, stop), step)
        elif isinstance(part, int):
            tensor = _aten.select(tensor, dim, part)
            continue
        else:
            rows = part if isinstance(part, Tensor) else torch.tensor(part)
            picked += [*[None] * (dim - len(picked)), rows]
            dim += rows.ndim - 1 if rows.dtype == torch.bool else 0
        dim += 1
    return tensor if not picked else _aten.index(tensor, picked)


def _setitem(tensor: Tensor, index: Any, value: Any) -> None:
    """``tensor[index] = value``."""
    parts = _expand_index(tensor, index)
    if any(isinstance(part, Tensor) for part in parts):
        rows = [part if isinstance(part, Tensor) else None for part in parts]
        if not isinstance(value, Tensor):
            value = _aten.scalar_tensor(value, dtype=tensor.dtype, device=DEVICE)
        _aten.index_put_(tensor, rows, value)
    elif isinstance(value, Tensor):
        _aten.copy_(_getitem(tensor, index), value)
    else:
        _aten.fill_(_getitem(tensor, index), value)
