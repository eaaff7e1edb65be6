"""What it takes to find a stream's blocks again: everything of its memory but the KV, as bytes. Nothing executable."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

VERSION = 1


@dataclass(slots=True)
class Manifest:
    """``header``: numbers and names, JSON; ``tensors``: by name; ``window``: the engine's own state of the stream."""

    header: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    window: bytes = b""

    def dump(self) -> bytes:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        if self.window:
            tensors["window"] = torch.frombuffer(bytearray(self.window), dtype=torch.uint8)
        body = json.dumps({"version": VERSION, **self.header})
        return save_tensors(tensors, metadata={"sightline": body})

    @classmethod
    def load(cls, data: bytes) -> Manifest | None:
        """The inverse of :meth:`dump`; None for anything else, or another version's."""
        try:
            size = int.from_bytes(data[:8], "little")
            if size > len(data):
                return None
            header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["sightline"])
            tensors = load_tensors(data)
        except (SafetensorError, ValueError, KeyError, TypeError):
            return None
        if not isinstance(header, dict) or header.pop("version", None) != VERSION:
            return None
        window = tensors.pop("window", None)
        return cls(header, tensors, b"" if window is None else window.numpy().tobytes())
