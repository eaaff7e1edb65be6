"""The way of host data to the device: none of it waits for what the device computes."""

import functools
from typing import Any

import torch
from torch import Tensor


def upload(parts: list[Tensor], device: torch.device) -> Tensor:
    """The tensors one after the other on the device; on a GPU from pinned memory in a queue of their own, beside what
    was launched before."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return torch.cat(parts).to(device)
    # Pinned memory is used again and again; a new copy's pages would have to be cleared first.
    shape = sum(map(len, parts)), *parts[0].shape[1:]
    held = torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))
    current, uploads = torch.cuda.current_stream(device), _queue(device)
    with torch.cuda.stream(uploads):
        uploaded = held.to(device, non_blocking=True)
    current.wait_stream(uploads)
    # Its memory is the other queue's, which must not use it again before this one has read it.
    uploaded.record_stream(current)
    return uploaded


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small host tensor, such as indices and positions, on the device, in order with what is computed there. From
    pageable memory the host would wait for everything that it has launched."""
    if device.type != "cuda" or tensor.device.type != "cpu" or not (len(tensor) and torch.cuda.is_available()):
        return tensor.to(device)
    # Of an expanded tensor nothing can be written to pinned memory.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def fill(out: Tensor, tensor: Tensor) -> None:
    """Write a small host tensor to memory that is there already, as :func:`to_device`."""
    if out.device.type == "cuda" and torch.cuda.is_available():
        tensor = tensor.contiguous().pin_memory()
    out.copy_(tensor, non_blocking=True)


@functools.cache
def _queue(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
