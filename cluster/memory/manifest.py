"""What it takes to find a stream's blocks again, as bytes. Nothing executable.

A manifest names the blocks that hold the index of each head (everything of its tokens but the KV, which those name in
turn) and the state of the window. These are blocks of bytes beside those of KV: written once, and only again when they
changed.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from cluster.memory.tiers.base import Block
from cluster.types import MICROSECONDS


@dataclass(slots=True)
class FrameLog:
    """``numbers`` and ``times`` (microseconds) of frames, ascending; ``following``: number of the next one; ``shift``:
    from the camera's clock to the memory's.

    Frames are numbered anew, because a camera whose decoder was restarted counts from 0 again; and a clock that was set
    back goes on from where it was.
    """

    numbers: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    next_number: int = 0
    shift: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, pts: int) -> tuple[int, int]:
        """A frame came at ``pts`` of the camera's clock: its number and time here."""
        if self.times and pts + self.shift <= self.times[-1]:
            self.shift = self.times[-1] + MICROSECONDS - pts
        number, time = self.next_number, pts + self.shift
        self.next_number += 1
        self.numbers.append(number)
        self.times.append(time)
        return number, time

    def time_of(self, pts: int) -> int:
        """The camera's time as it counts here."""
        return pts + self.shift if self.times else pts

    def frame_time(self, number: int) -> int:
        """Time of a frame."""
        return self.times[bisect.bisect_left(self.numbers, number)]

    def seconds(self, frame: Tensor) -> Tensor:
        """Times ``[n]`` float64, in seconds, of frames ``[n]``."""
        numbers = torch.tensor(self.numbers, dtype=torch.int64)
        times = torch.tensor(self.times, dtype=torch.float64) / MICROSECONDS
        return times[torch.searchsorted(numbers, frame.to(torch.int64).cpu().contiguous())]

    def first_frame_since(self, time: int) -> int:
        """Number of the first frame at or after ``time``."""
        place = bisect.bisect_left(self.times, time)
        return self.numbers[place] if place < len(self.numbers) else self.next_number

    def delete_before(self, number: int) -> None:
        place = bisect.bisect_left(self.numbers, number)
        del self.numbers[:place], self.times[:place]

    def keep_frames(self, numbers: Collection[int]) -> None:
        """Only these frames are held from now on."""
        kept = [place for place, number in enumerate(self.numbers) if number in numbers]
        self.numbers, self.times = [self.numbers[place] for place in kept], [self.times[place] for place in kept]

    def state(self) -> dict[str, Any]:
        """Everything, as JSON can hold it; ``FrameLog(**state)`` is its inverse."""
        return asdict(self)


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
