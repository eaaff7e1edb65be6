"""Copies between a GPU and pinned host memory, overlapped with computation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """Tensors in host memory, valid once ``_copied`` (a CUDA event; None: at once) has completed."""

    _tensors: tuple[Tensor, ...]
    _copied: Any

    @property
    def done(self) -> bool:
        return self._copied is None or bool(self._copied.query())

    @property
    def nbytes(self) -> int:
        """Bytes of host memory; torch rounds pinned allocations up to powers of two."""
        sizes = [tensor.nbytes for tensor in self._tensors]
        return sum(sizes if self._copied is None else (1 << (size - 1).bit_length() for size in sizes))

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, after waiting for their copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors

    def join(self) -> None:
        """Make the current CUDA stream wait for the copy; does not block the host."""
        if self._copied is not None:
            self._copied.wait()

    def __getitem__(self, number: int) -> Tensor:
        """One tensor without waiting; only for device work queued after :meth:`join`."""
        return self._tensors[number]


class HostCopies:
    """Copies from and to one device; a GPU has two copy streams, one for each direction of PCIe."""

    def __init__(self, device: torch.device) -> None:
        real = device.type == "cuda" and torch.cuda.is_available()
        self._device = device
        self._out: Any = torch.cuda.Stream(device) if real else None  # type: ignore[no-untyped-call]
        self._in: Any = torch.cuda.Stream(device) if real else None  # type: ignore[no-untyped-call]
        self._freed: Any = None

    def mark_freed(self) -> None:
        """Device memory was freed: copies into it must wait for the work queued so far, which may still use it."""
        if self._in is not None:
            self._freed = torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def outward(self) -> Iterator[None]:
        """Run operations in the outward copy stream, after all work queued before."""
        if self._out is None:
            yield
            return
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            yield

    @contextmanager
    def inward(self) -> Iterator[None]:
        """Run operations in the inward copy stream, after the work that used memory freed so far."""
        if self._in is None:
            yield
            return
        if self._freed is not None:
            self._in.wait_event(self._freed)
        with torch.cuda.stream(self._in):
            yield

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start copying tensors that were created within :meth:`outward`."""
        if self._out is None:
            return HostCopy(tuple(tensor.to("cpu") for tensor in tensors), None)
        held = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors)
        for mine, tensor in zip(held, tensors, strict=True):
            mine.copy_(tensor, non_blocking=True)
        return HostCopy(held, self._out.record_event())

    def keep_until_read(self, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of these tensors from being reused before the copies started so far have read it."""
        for each in tensors if self._out is not None else ():
            each.record_stream(self._out)

    def arrival(self) -> HostCopy:
        """Completion of all copies to the device so far; holds no tensors."""
        return HostCopy((), None if self._in is None else self._in.record_event())
