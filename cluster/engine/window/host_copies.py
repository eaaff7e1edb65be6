"""Copies between a GPU and pinned host memory, beside the computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """Tensors in host memory, valid for the host once ``_copied`` (an event on a GPU) has happened."""

    _tensors: tuple[Tensor, ...]
    _copied: Any

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors; waits for their copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors

    def __getitem__(self, number: int) -> Tensor:
        """One of them, only for copies back to the GPU, which wait for it there."""
        return self._tensors[number]


class HostCopies:
    """Copies of one device, in a queue of their own on a GPU; what follows on the device waits for :meth:`join`."""

    def __init__(self, device: torch.device) -> None:
        real = device.type == "cuda" and torch.cuda.is_available()
        self._device = device
        self._queue: Any = torch.cuda.Stream(device) if real else None  # type: ignore[no-untyped-call]
        self._behind = False

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Operations in here run beside the computation, after all that was started before."""
        if self._queue is None:
            yield
            return
        self._queue.wait_stream(torch.cuda.current_stream(self._device))
        self._behind = True
        with torch.cuda.stream(self._queue):
            yield

    def join(self) -> None:
        """What is started from here on waits for the copies begun so far."""
        if self._behind:
            torch.cuda.current_stream(self._device).wait_stream(self._queue)
            self._behind = False

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Begin the copy of tensors that were made in :meth:`queue`."""
        if self._queue is None:
            return HostCopy(tuple(tensor.to("cpu") for tensor in tensors), None)
        held = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors)
        for mine, tensor in zip(held, tensors, strict=True):
            mine.copy_(tensor, non_blocking=True)
        copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._queue)
        return HostCopy(held, copied)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Begin a host tensor's copy to the device, in the current queue."""
        if self._queue is not None:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
