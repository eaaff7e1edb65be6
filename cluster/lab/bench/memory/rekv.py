"""Frames that questions read with the retriever ``rekv``, against the rule of ReKV's published code stated in numpy.

Real frames and question queries; a memory of whole frames, retrieved as production does. The numpy statement goes
through the raw keys of all frames, with a key head repeated for each of its query heads.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import CAMERA, Footage, Watched
from cluster.memory.retrieval_session import RetrievalSession
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.registry import retrievers
from cluster.types import MemorySpec

FRAMES = 8
"""Frames a question reads: fewer than there are at any question."""

_ROOM = 2**30


def measure(footage: Footage) -> Part:
    """Figure ``rekv_parity``: share of layers and questions in which every head read just the published frames."""
    query_heads = footage.model(footage.args.model).text_config.num_attention_heads
    rows: list[dict[str, Any]] = []
    for watched in footage.watched(footage.args.model):
        same = same_frames(watched, query_heads)
        layers, heads = watched.chunks[0].key.shape[:2]
        rows.append(
            {
                "clip": watched.clip,
                "questions": len(watched.asked),
                "layers": layers,
                "key_heads": heads,
                "query_heads": query_heads,
                "frames": watched.asked[-1].frames,
                "read": FRAMES,
                "parity": statistics.fmean(same),
            }
        )
    return Part({"rekv_parity": min(row["parity"] for row in rows)}, rows)


def same_frames(watched: Watched, query_heads: int) -> list[bool]:
    """For each question and layer, whether all heads read the published frames and no other."""
    spec = MemorySpec(compressor="none", organiser="frames", cap_bytes=_ROOM)
    memory = StreamMemory(CAMERA, spec, TierStack([Arena(_ROOM)]))
    retriever = retrievers.get("rekv")(frames=FRAMES)
    keys = [chunk.key.float().cpu().numpy() for chunk in watched.chunks]
    found = []
    for asked in watched.asked:
        for chunk in watched.chunks[memory.frames : asked.frames]:
            memory.add_chunk(chunk)
        memory.settle()
        with RetrievalSession(memory, retriever) as retrieval:
            for layer, query in enumerate(asked.queries):
                by_head = query.cpu().numpy().reshape(query_heads, -1, query.shape[2])
                wanted = published_frames(by_head, [key[layer] for key in keys[: asked.frames]], FRAMES)
                read = retrieval.fetch(layer, query)
                frames = [set(of[there].tolist()) for of, there in zip(read.frame, read.valid, strict=True)]
                found.append(all(each == wanted for each in frames))
    return found


def published_frames(query: np.ndarray, keys: Sequence[np.ndarray], count: int) -> set[int]:
    """Numbers of the ``count`` frames whose mean key has the largest dot product with the mean query, heads
    concatenated.

    Args:
        query: all query heads, before rotary ``[H, r, D]``.
        keys: per frame, before rotary ``[Hkv, t, D]``.
    """
    group = len(query) // len(keys[0])
    question = query.astype(np.float64).mean(axis=1).ravel()
    frames = np.stack([key.astype(np.float64).mean(axis=1).repeat(group, axis=0).ravel() for key in keys])
    return set(np.argsort(-(frames @ question), kind="stable")[:count].tolist())
