"""What it takes to find a stream's blocks again, as bytes. Nothing executable.

A manifest names the blocks that hold the index of each head (everything of its tokens but the KV, which those name in
turn) and the state of the window. These are blocks of bytes beside those of KV: written once, and only again when they
changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from cluster.memory.tiers.base import Block

VERSION = 2

PART_BYTES = 256 * 1024
"""Most bytes of one block of bytes."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class Manifest:
    """``header``: numbers and names, JSON; ``tensors``: by name."""

    header: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def dump(self) -> bytes:
        return dump_tensors(self.tensors, {"version": VERSION, **self.header})

    @classmethod
    def load(cls, data: bytes) -> Manifest | None:
        """The inverse of :meth:`dump`; None for anything else, or another version's."""
        try:
            header, tensors = header_of(data), load_parts(data)
        except (ValueError, KeyError, TypeError):
            return None
        return cls(header, tensors) if header.pop("version", None) == VERSION else None


def dump_tensors(tensors: dict[str, Tensor], header: dict[str, Any] | None = None) -> bytes:
    """Named tensors as bytes, with our header."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save_tensors(whole, metadata={"sightline": json.dumps(header or {})})


def load_parts(data: bytes) -> dict[str, Tensor]:
    """Named tensors out of bytes.

    Raises:
        ValueError: these are none.
    """
    try:
        return load_tensors(data)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def header_of(data: bytes) -> dict[str, Any]:
    """Our JSON header of safetensors, which begin with the length of theirs as eight little-endian bytes.

    Raises:
        ValueError, KeyError, TypeError: there is none.
    """
    size = int.from_bytes(data[:8], "little")
    if size > len(data):
        raise ValueError("shorter than its header says")
    header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["sightline"])
    if not isinstance(header, dict):
        raise TypeError("its header is no object")
    return header


def byte_blocks(data: bytes) -> list[Block]:
    """Bytes as blocks of uint8, two rows each; ``frame`` has how many bytes are in it."""
    blocks = []
    for at in range(0, len(data), PART_BYTES):
        part = data[at : at + PART_BYTES]
        rows = torch.frombuffer(bytearray(part + bytes(-len(part) % 4)), dtype=torch.uint8).view(2, 1, -1)
        size = torch.tensor([len(part)], dtype=torch.int32)
        blocks.append(Block(rows[0], rows[1], size, torch.zeros(1, dtype=torch.int32)))
    return blocks


def block_bytes(blocks: Iterable[Block]) -> bytes:
    """The inverse of :func:`byte_blocks`.

    Raises:
        ValueError: blocks of something else.
    """
    parts = []
    for block in blocks:
        if block.key.dtype != torch.uint8 or len(block) != 1:
            raise ValueError("a block that does not hold bytes")
        whole = torch.cat([block.key.flatten(), block.value.flatten()]).numpy().tobytes()
        parts.append(whole[: int(block.frame[0])])
    return b"".join(parts)


def whole_numbers(found: Any, count: int | None = None) -> list[int]:
    """A list of whole numbers out of JSON, of ``count`` where that is given.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(found, Sequence) or not all(type(each) is int for each in found):
        raise ValueError("a list of whole numbers is something else")
    if count is not None and len(found) != count:
        raise ValueError(f"{len(found)} numbers where {count} are due")
    return list(found)
