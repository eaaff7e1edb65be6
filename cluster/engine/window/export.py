"""Serialised stream state: safetensors with a JSON header.

Keys are rotated in the stream's own time, which is part of the state, so the KV is valid in any process and window.
Frames that are not encoded yet are exported as patches.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from cluster.engine.window.kv import StreamKV
from cluster.engine.window.stream import LastWindow, Stream, StreamFrame, WindowProgress, embeddings, encoded_tokens
from cluster.engine.window.windows import WindowClock, WindowSpan
from cluster.errors import CapacityError, ModelError
from cluster.memory.frame_retrieval import FrameReads
from cluster.memory.manifest import dump_tensors, load_parts, read_header
from cluster.models.base import FrameTokens
from cluster.types import Answer, PatchGrid, Question, StreamSpec, Timing, TokenCount

VERSION = 3
_STREAM = (
    "windows_since_fresh",
    "next_token",
    "last_motion_dropped",
    "newest",
    "epoch",
    "seen",
    "encoded",
    "tower_flops",
)
# Scalar fields of a frame; its arrays are stored as tensors.
_FRAME = tuple(each.name for each in fields(StreamFrame) if each.init and each.type in (int, bool, float))


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Immutable copy of one stream's state, not serialised yet."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def dump(self) -> bytes:
        """Serialise for :func:`load`; callable from any thread."""
        # Queue all copies before waiting once: a wait also waits for everything queued on the GPU before.
        tensors = {name: tensor.to("cpu", non_blocking=True) for name, tensor in self.tensors.items()}
        if torch.cuda.is_available() and any(tensor.device.type == "cuda" for tensor in self.tensors.values()):
            torch.cuda.current_stream().synchronize()
        return dump_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, self.header)


def snapshot(stream: Stream, fingerprint: str) -> Snapshot:
    """Snapshot a stream; ``fingerprint``: of its engine."""
    # Embeddings, cells, positions, masks and patches are replaced, never changed in place; the rest is copied.
    tensors: dict[str, Tensor] = {}
    for number, frame in enumerate(stream.frames):
        tensors |= {f"{number}.{name}": tensor for name, tensor in _frame_tensors(frame).items()}
    if stream.kv.pool is not None:
        tensors["k"], tensors["v"] = stream.kv.stored()
    last = stream.last
    header = {
        "version": VERSION,
        "fingerprint": fingerprint,
        "life": stream.spec.life,
        "frames": [{n: getattr(f, n) for n in _FRAME} | {"grid": asdict(f.grid)} for f in stream.frames],
        "clock": asdict(stream.clock),
        "outstanding": [asdict(span) for span in stream.outstanding],
        "last": None if last is None else asdict(last),
        **{name: getattr(stream, name) for name in _STREAM},
        "progress": None if stream.progress is None else asdict(stream.progress),
    }
    return Snapshot(header, tensors)


def load(state: bytes, spec: StreamSpec, kv: StreamKV, fingerprint: str) -> Stream:
    """Inverse of :meth:`Snapshot.dump`; fills the empty ``kv``. Raises ``CapacityError``: the pool is full, or the
    device out of memory; ``ModelError``: not a stream's state, another version, or computed with another model."""
    try:
        header = read_header(state)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"not the state of a stream: {error}") from error
    if header.get("version") != VERSION:
        raise ModelError(f"{spec.stream}: this state has version {header.get('version')}, this engine reads {VERSION}")
    if header.get("fingerprint") != fingerprint:
        raise ModelError(f"{spec.stream}: this state was computed with another model; load the same one to import it")
    try:
        tensors = load_parts(state)
        device = torch.device("cpu") if kv.pool is None else kv.pool.device
        frames = [_frame(meta, number, tensors, device) for number, meta in enumerate(header["frames"])]
        stream = Stream(
            spec=spec,
            kv=kv,
            clock=WindowClock(**header["clock"]),
            frames=frames,
            outstanding=[WindowSpan(**span) for span in header["outstanding"]],
            last=_last(header["last"]),
            progress=_progress(header["progress"]),
            **{name: header[name] for name in _STREAM},
        )
        # Last, because it allocates slots.
        _fill(kv, tensors, sum(len(encoded_tokens(frame)) for frame in frames if frame.has_kv))
        return stream
    except torch.AcceleratorError:
        raise
    except torch.OutOfMemoryError as error:
        kv.clear()
        raise CapacityError(f"{spec.stream}: its saved window has no room: {error}") from error
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        kv.clear()
        raise ModelError(f"{spec.stream}: this state is damaged: {error}") from error


def _frame_tensors(frame: StreamFrame) -> dict[str, Tensor]:
    tensors = {"mask": torch.from_numpy(frame.mask)}
    if frame.patches is not None:
        tensors["patches"] = torch.from_numpy(frame.patches)
    if frame.tokens is not None:
        tensors |= {"embeds": embeddings(frame), "cells": frame.tokens.cells}
    if frame.positions is not None:
        tensors["positions"] = frame.positions
    if frame.computed is not None:
        # Later windows change it in place.
        tensors["computed"] = torch.from_numpy(frame.computed.copy())
    return tensors


def _frame(meta: dict[str, Any], number: int, tensors: dict[str, Tensor], device: torch.device) -> StreamFrame:
    def optional(name: str) -> npt.NDArray[Any] | None:
        tensor = tensors.get(f"{number}.{name}")
        return None if tensor is None else tensor.numpy().copy()

    grid = PatchGrid(**meta["grid"])
    tokens = None
    if f"{number}.embeds" in tensors:
        embeds, cells = tensors[f"{number}.embeds"], tensors[f"{number}.cells"]
        tokens = FrameTokens(embeds.to(device), cells, grid)
    return StreamFrame(
        **{name: meta[name] for name in _FRAME},
        grid=grid,
        mask=tensors[f"{number}.mask"].numpy().copy(),
        patches=optional("patches"),
        tokens=tokens,
        positions=tensors.get(f"{number}.positions"),
        computed=optional("computed"),
    )


def _fill(kv: StreamKV, tensors: dict[str, Tensor], tokens: int) -> None:
    """Allocate slots for these tokens and store the state's KV in them; a state without KV takes no slots of a pool."""
    if kv.pool is None or "k" in tensors:
        kv.resize(tokens)
    if kv.pool is None or "k" not in tensors:
        return
    index = kv.pool.index(kv.slots)
    for pool, part in ((kv.pool.k, tensors["k"]), (kv.pool.v, tensors["v"])):
        pool.index_copy_(1, index, part.to(kv.pool.device).transpose(1, 2))


def _progress(meta: dict[str, Any] | None) -> WindowProgress | None:
    return None if meta is None else WindowProgress(**{**meta, "reads": FrameReads(**meta["reads"])})


def _last(meta: dict[str, Any] | None) -> LastWindow | None:
    if meta is None:
        return None
    answers = [
        Answer(**{**answer, "tokens": TokenCount(**answer["tokens"]), "timing": Timing(**answer["timing"])})
        for answer in meta["answers"]
    ]
    questions = tuple(Question(**question) for question in meta["questions"])
    return LastWindow(meta["window"], meta["end"], questions, tuple(answers))
