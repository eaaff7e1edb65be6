"""Manifests: the root from which a stream's blocks are found; JSON and tensors, nothing executable.

A manifest names the blocks with each head's index (all token metadata, and the names of its KV blocks), and those with
the window and compressor state. These are byte blocks beside the KV blocks, rewritten only when they change.
"""

from __future__ import annotations

import bisect
import json
import math
import secrets
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from safetensors import SafetensorError, TensorSpec, serialize
from safetensors.torch import load as load_tensors
from torch import Tensor

from cluster.memory.memory_counts import MemoryReport
from cluster.memory.tiers.base import Block, Outcome
from cluster.types import MICROSECONDS, MemorySpec

if TYPE_CHECKING:
    from cluster.memory.tiers.stack import TierStack


def _integers(numbers: Iterable[int] = ()) -> array[int]:
    """A compact array of 64-bit integers, cheap to copy: a log holds a day's frames."""
    return array("q", numbers)


RESTART_GAP = 10 * MICROSECONDS
"""Minimum time between the last frame before a clock restart and the first one after it: more than the interval of
thumbnails, so that no moment gets a thumbnail from the other side."""
LATE = 60 * MICROSECONDS
"""How much further ahead than time has passed a clock still counts as going on: its frames may have waited."""


@dataclass(slots=True)
class FrameLog:
    """Numbers and times (microseconds) of stored frames, ascending, and the memory's clock.

    Frames are renumbered, since a restarted decoder counts from 0 again. Times follow the camera's clock; if it
    restarts at or behind the latest time, or far ahead, they continue from that, plus the time without frames.

    * ``next_number``: number of the next frame
    * ``shift``: offset of the memory's clock from the camera's; ``latest``: time of the newest frame, stored or not
    """

    numbers: array[int] = field(default_factory=_integers)
    times: array[int] = field(default_factory=_integers)
    next_number: int = 0
    shift: int = 0
    latest: int = -(2**62)

    def __len__(self) -> int:
        return len(self.numbers)

    def copy(self) -> FrameLog:
        return replace(self, numbers=self.numbers[:], times=self.times[:])

    def without_frames(self) -> FrameLog:
        """A copy of the clock with no stored frames."""
        return replace(self, numbers=_integers(), times=_integers())

    def next_time(self, pts: int, *, restarts: bool, silent_s: float, follows: bool) -> int:
        """Time of a camera's next frame, ``silent_s`` seconds after the previous one; ``restarts``: the camera's clock
        may have restarted in between; ``follows``: however far ahead it is, it is right."""
        if restarts:
            # If outages took no time, they would extend the retention; if clocks set ahead took any, shorten it.
            gap, ahead = max(RESTART_GAP, round(silent_s * MICROSECONDS)), pts - self.latest
            goes_on = ahead > 0 and (follows or ahead <= gap + LATE)
            self.shift = 0 if goes_on else self.latest + gap - pts
        self.latest = pts + self.shift
        return self.latest

    def add(self, time: int) -> int:
        """Append a frame newer than all stored ones; returns its number."""
        number = self.next_number
        self.next_number += 1
        self.numbers.append(number)
        self.times.append(time)
        self.latest = max(self.latest, time)
        return number

    def put_before(self, time: int) -> None:
        """Shift all times back if needed so that the latest is before ``time``."""
        if self.latest >= time:
            back = self.latest + RESTART_GAP - time
            self.times, self.latest = _integers(each - back for each in self.times), self.latest - back

    def frame_time(self, number: int) -> int:
        return self.times[bisect.bisect_left(self.numbers, number)]

    def frame_times(self, frame: Tensor) -> Tensor:
        """Times ``[n]`` int64, in microseconds, of frames ``[n]``."""
        numbers, times = (torch.from_numpy(np.array(part)) for part in (self.numbers, self.times))
        return times[torch.searchsorted(numbers, frame.to(torch.int64).cpu().contiguous())]

    def first_frame_since(self, time: int) -> int:
        """Number of the first frame at or after ``time``."""
        place = bisect.bisect_left(self.times, time)
        return self.numbers[place] if place < len(self.numbers) else self.next_number

    def delete_before(self, number: int) -> None:
        place = bisect.bisect_left(self.numbers, number)
        del self.numbers[:place], self.times[:place]

    def delete_after(self, number: int) -> None:
        place = bisect.bisect_right(self.numbers, number)
        del self.numbers[place:], self.times[place:]

    def keep_frames(self, numbers: Collection[int]) -> None:
        kept = [place for place, number in enumerate(self.numbers) if number in numbers]
        self.numbers, self.times = (_integers(part[place] for place in kept) for part in (self.numbers, self.times))

    def state(self) -> dict[str, Any]:
        return {
            "numbers": list(self.numbers),
            "times": list(self.times),
            "next_number": self.next_number,
            "shift": self.shift,
            "latest": self.latest,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`state`; ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        check_integers([state["next_number"], state["shift"], state["latest"]])
        numbers, times = check_integers(state["numbers"]), check_integers(state["times"])
        if len(numbers) != len(times):
            raise ValueError("frames without times")
        return cls(**{**state, "numbers": _integers(numbers), "times": _integers(times)})


class StoredManifest:
    """A stream's manifest in the lowest tier. Detects replacement by another process: streams move, and the previous
    process's last write may come late. ``owner``: written with each manifest, see :func:`read_owner`."""

    def __init__(self, stream: str, tiers: TierStack) -> None:
        self.stream, self.tiers = stream, tiers
        self.owner = 1, secrets.token_hex(8)
        # Hashes of manifests that may be stored: the last one read or written, and those whose write is uncertain.
        self._known: set[int] = set()

    def read(self) -> tuple[Outcome, bytes | None]:
        outcome, data = self.tiers.manifest(self.stream)
        if data is not None:
            self._known = {hash(data)}
            self.owner = max(self.owner[0], read_owner(data)[0] + 1), self.owner[1]
        return outcome, data

    def write(self, manifest: bytes) -> bool:
        """Replace the manifest; False if the lowest tier refuses, or another process may have taken the stream over."""
        if not self.tiers.confirmed() and self.compare() in ("later", "unreadable"):
            return False
        self._known.add(hash(manifest))
        if self.tiers.put_manifest(self.stream, manifest) is not Outcome.HIT:
            return False
        self._known = {hash(manifest)}
        return True

    def compare(self) -> Literal["same", "absent", "earlier", "later", "unreadable"]:
        """Compare the stored manifest with the last one read or written here. ``earlier``: the tier was restored from a
        backup or failed over to a lagging replica; ``later``: another process took the stream over."""
        outcome, data = self.tiers.manifest(self.stream)
        if outcome is Outcome.RETRY:
            return "unreadable"
        if data is None or hash(data) in self._known:
            return "absent" if data is None else "same"
        number, writer = read_owner(data)
        later = number > self.owner[0] or (number == self.owner[0] and writer != self.owner[1])
        return "later" if later else "earlier"


EXPIRY_STEP = 1 / 16
"""Share of the retention by which frames may exceed it before they are deleted, in one batch."""

_EXPIRY_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class ReleasedMemory:
    """Record of a released memory.

    Attributes:
        manifest: as of its release; None if another process writes the memory.
        newest_s: arrival of its newest frame, monotonic.
        tried_s: last attempt to delete expired frames, monotonic.
    """

    spec: MemorySpec
    manifest: StoredManifest | None
    newest_s: float
    report: MemoryReport
    tried_s: float = -math.inf

    def is_of(self, manifest: StoredManifest) -> bool:
        """Whether ``manifest``, just read, shows that nobody has written the memory since its release."""
        return self.manifest is not None and not self.manifest._known.isdisjoint(manifest._known)

    def is_due(self, now_s: float) -> bool:
        """Whether it holds expired frames; False for a while after each attempt to delete them."""
        retention_s = self.spec.retention_s
        if self.manifest is None or retention_s is None or now_s - self.tried_s < _EXPIRY_PAUSE_S:
            return False
        return self.report.span_s + now_s - self.newest_s > (1 + EXPIRY_STEP) * retention_s


VERSION = 7

LAYOUT = ("organiser", "kv_dtype", "organiser_options")
"""Settings that a stored memory must match to be usable; for questions, only the first two."""

PART_BYTES = 256 * 1024
"""Maximum size of a byte block."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dump_manifest(header: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """Serialise the JSON header and the named tensors of one stored memory."""
    return dump_tensors(tensors, {"version": VERSION, **header})


def load_manifest(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Inverse of :func:`dump_manifest`; None for anything else, or another version."""
    try:
        header, tensors = read_header(data), load_parts(data)
    except (ValueError, KeyError, TypeError):
        return None
    return (header, tensors) if header.pop("version", None) == VERSION else None


def check_parts(header: Mapping[str, Any], heads: int) -> list[list[int]]:
    """Block numbers of each head's index; ``ValueError`` if the header does not describe ``heads`` heads."""
    check_integers(header["tokens"], heads)
    parts = [check_integers(part) for part in header["parts"]]
    if len(parts) != heads:
        raise ValueError(f"index blocks of {len(parts)} heads instead of {heads}")
    return parts


def dump_tensors(tensors: dict[str, Tensor], header: dict[str, Any] | None = None) -> bytes:
    """Serialise named tensors (safetensors) with a JSON header.

    ``safetensors.torch.save`` leaks: it makes a ctypes pointer type per size in bytes, and ctypes never frees those.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(each.dtype).removeprefix("torch."),
            shape=each.shape,
            data_ptr=each.data_ptr(),
            data_len=each.nbytes,
        )
        for name, each in whole.items()
    }
    return bytes(serialize(specs, metadata={"sightline": json.dumps(header or {})}))


def load_parts(data: bytes) -> dict[str, Tensor]:
    """Deserialise named tensors; ``ValueError`` if the data is not safetensors."""
    try:
        return load_tensors(data)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def read_header(data: bytes) -> dict[str, Any]:
    """Read the JSON header of safetensors bytes, which begin with its length as 8 little-endian bytes; ``ValueError``,
    ``KeyError`` or ``TypeError`` if there is none."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data):
        raise ValueError("truncated header")
    header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["sightline"])
    if not isinstance(header, dict):
        raise TypeError("the header is not a JSON object")
    return header


def read_life(data: bytes) -> str:
    """Life of the camera a manifest belongs to; empty for anything else."""
    try:
        return str(read_header(data)["life"])
    except (ValueError, KeyError, TypeError):
        return ""


def read_owner(data: bytes) -> tuple[int, str]:
    """Number of the process that wrote a manifest, which exceeds those of previous owners, and its random id; ``0, ""``
    for anything else."""
    try:
        number, writer = read_header(data)["owner"]
        return int(number), str(writer)
    except (ValueError, KeyError, TypeError):
        return 0, ""


def to_byte_blocks(data: bytes) -> list[Block]:
    """Split bytes into uint8 blocks of two rows; ``frame`` holds the byte count."""
    blocks = []
    for at in range(0, len(data), PART_BYTES):
        part = data[at : at + PART_BYTES]
        rows = torch.frombuffer(bytearray(part + bytes(-len(part) % 4)), dtype=torch.uint8).view(2, 1, -1)
        size = torch.tensor([len(part)], dtype=torch.int32)
        blocks.append(Block(rows[0], rows[1], size, torch.zeros(1, dtype=torch.int32)))
    return blocks


def from_byte_blocks(blocks: Iterable[Block]) -> bytes:
    """Inverse of :func:`to_byte_blocks`; ``ValueError`` for other blocks."""
    parts = []
    for block in blocks:
        if block.key.dtype != torch.uint8 or len(block) != 1:
            raise ValueError("a block that does not hold bytes")
        whole = torch.cat([block.key.flatten(), block.value.flatten()]).numpy().tobytes()
        parts.append(whole[: int(block.frame[0])])
    return b"".join(parts)


def check_integers(found: Any, count: int | None = None) -> list[int]:
    """Check that a JSON value is a list of integers, of length ``count`` if given; ``ValueError`` otherwise."""
    if not isinstance(found, Sequence) or not all(type(each) is int for each in found):
        raise ValueError("expected a list of integers")
    if count is not None and len(found) != count:
        raise ValueError(f"expected {count} integers, not {len(found)}")
    return list(found)
