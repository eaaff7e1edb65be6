"""What it takes to find a stream's blocks again: everything of its memory but the KV, as bytes. Nothing executable."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from cluster.memory.frame_log import FrameLog
from cluster.memory.organise.partitions import VisualPartitions

if TYPE_CHECKING:
    from cluster.memory.stream import StreamMemory

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
            header = header_of(data)
            tensors = load_tensors(data)
        except (SafetensorError, ValueError, KeyError, TypeError):
            return None
        if header.pop("version", None) != VERSION:
            return None
        window = tensors.pop("window", None)
        return cls(header, tensors, b"" if window is None else window.numpy().tobytes())


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


def manifest_of(memory: StreamMemory, window: bytes) -> Manifest:
    """A memory as it is. Frames that wait are in no block and not in it: who restores goes on without them."""
    tensors: dict[str, Tensor] = {}
    for number, h, head in memory.every_head():
        tensors |= {f"{number}.{h}.{name}": tensor for name, tensor in head.state().items()}
    if memory.partitions is not None:
        tensors |= {f"partitions.{name}": tensor for name, tensor in memory.partitions.state().items()}
    log = memory.log.state()
    settled = len(memory.log) - len(memory.recent)
    header: dict[str, Any] = {
        "layers": len(memory.heads),
        "heads": len(memory.heads[0]) if memory.heads else 0,
        "width": memory.heads[0][0].organiser.table.mean.shape[1] if memory.heads else 0,
        "rows": memory.rows,
        "columns": memory.columns,
        "dtype": str(memory.dtype).removeprefix("torch."),
        "organiser": memory.spec.organiser,
        "log": log | {"numbers": log["numbers"][:settled], "times": log["times"][:settled]},
        "partition_of": [[frame, partition] for frame, partition in memory.partition_of.items()],
    }
    return Manifest(header, tensors, window)


def take_over(memory: StreamMemory, manifest: Manifest) -> bool:
    """Make an empty memory what the manifest says; False, and nothing done, where another organiser made it."""
    header, tensors = manifest.header, manifest.tensors
    if header["organiser"] != memory.spec.organiser:
        return False
    memory.rows, memory.columns = header["rows"], header["columns"]
    memory.dtype = getattr(torch, header["dtype"])
    memory.log = FrameLog(**header["log"])
    memory.partition_of = dict(header["partition_of"])
    memory.begin_heads(header["layers"], header["heads"], header["width"])
    for number, h, head in memory.every_head():
        prefix = f"{number}.{h}."
        head.load_state({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
        table = head.organiser.table
        for uid, count in zip(table.uid.tolist(), table.count.tolist(), strict=True):
            memory.note_size(number, h, uid, count * memory.token_bytes)
    parts = {n.removeprefix("partitions."): t for n, t in tensors.items() if n.startswith("partitions.")}
    if parts:
        memory.partitions = VisualPartitions.restore(parts)
    return True
