"""Host-to-device copies that never make the host wait for the device's computation."""

import functools
from typing import Any

import torch
from torch import Tensor


def upload(parts: list[Tensor], device: torch.device) -> Tensor:
    """Concatenate the tensors on the device; on a GPU, from pinned memory on a separate stream, overlapping earlier
    work."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return torch.cat(parts).to(device)
    # Torch caches pinned memory; pages of a fresh allocation would have to be cleared first.
    shape = sum(map(len, parts)), *parts[0].shape[1:]
    held = torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))
    current, uploads = torch.cuda.current_stream(device), _queue(device)
    with torch.cuda.stream(uploads):
        uploaded = held.to(device, non_blocking=True)
    current.wait_stream(uploads)
    # The upload stream owns its memory, and must not reuse it before the current stream has read it.
    uploaded.record_stream(current)
    return uploaded


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor, such as indices or positions, to the device, in stream order. From pageable memory, the
    host would wait for everything it has launched."""
    if device.type != "cuda" or tensor.device.type != "cpu" or not (len(tensor) and torch.cuda.is_available()):
        return tensor.to(device)
    # An expanded tensor cannot be pinned.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def fill(out: Tensor, tensor: Tensor) -> None:
    """Copy a small host tensor into an existing tensor, as :func:`to_device` does."""
    if out.device.type == "cuda" and torch.cuda.is_available():
        tensor = tensor.contiguous().pin_memory()
    out.copy_(tensor, non_blocking=True)


@functools.cache
def _queue(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
