"""What compressors keep of objects that move through the pictures of a camera that does not.

The KV of whole frames of made clips goes into a memory that is compressed, as eviction does it, whenever it holds more
than a quarter of all tokens there will be. The truth of a clip says which cells its moving objects cover.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.lab.bench.frames import prune_clip, read_clip
from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import CAMERA, Footage
from cluster.lab.scenes.street_clips import make_clip
from cluster.lab.scenes.truth import SceneTruth
from cluster.memory.eviction import compress
from cluster.memory.head_memory import KVChunk
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.types import MICROSECONDS, MemorySpec

TUNED = (("street", 0), ("street", 1), ("street", 2))
HELD_OUT = (("street", 3), ("street", 4), ("street", 5), ("noisy", 11), ("hevc", 12))
"""Kind and seed of the clips that the settings of ``cords`` were chosen on, and of those they were not."""
COMPARED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "cords": ("cords", {}),
    "cords_paper": ("cords", {"objective": "paper"}),
    "infinipot_v": ("infinipot_v", {}),
    "uniform": ("uniform", {}),
}

_QUARTER, _TARGET = 0.25, 0.75
_BLOCK = 4
_FPS, _SAMPLED_FPS = 6.0, 2.0
_COVERED = 0.5
_ROOM = 2**29


def measure(footage: Footage) -> Part:
    """Figures ``object_kept_<name>_quarter``: the worst of the clips held out."""
    args = footage.args
    rows: list[dict[str, Any]] = []
    for clips, held_out in ((TUNED, False), (HELD_OUT, True)):
        for kind, seed in clips:
            chunks, cells = _watch(footage, kind, seed)
            for name, (compressor, options) in COMPARED.items():
                found = _row(chunks, cells, compressor, options)
                rows.append({"clip": f"{kind} {seed}", "held_out": held_out, "compressor": name, **found})
            print(f"objects: {kind} {seed}", file=sys.stderr)
    # The worst of the clips held out.
    figures = {
        f"object_kept_{name}_quarter": min(
            row["object_kept"] for row in rows if row["held_out"] and row["compressor"] == name
        )
        for name in COMPARED
    }
    return Part(figures, rows, [f"model {args.model}; whole frames; held, object: shares of all tokens that came"])


def _watch(footage: Footage, kind: str, seed: int) -> tuple[list[KVChunk], list[set[int]]]:
    """What leaves the windows of a made clip, and of each frame the cells of its moving objects."""
    seconds = footage.args.object_seconds
    with TemporaryDirectory() as directory:
        path = Path(directory) / "clip.mp4"
        truth = make_clip(kind, path, seconds=seconds, fps=_FPS, seed=seed)
        geometry = footage.model(footage.args.model).geometry
        frames = read_clip(path, geometry, fps=_SAMPLED_FPS, at_least=seconds, at_most=seconds)
    samples = prune_clip(frames, CAMERA, "none").samples
    chunks = footage.watch(footage.args.model, f"{kind} {seed}", samples).chunks
    begins = samples[0].pts
    # A frame may be of two pictures.
    shown = [number / _SAMPLED_FPS for number in range(geometry.temporal)]
    return chunks, [
        set().union(*(object_cells(truth, (c.pts - begins) / MICROSECONDS + at, c.rows, c.columns) for at in shown))
        for c in chunks
    ]


def object_cells(truth: SceneTruth, second: float, rows: int, columns: int) -> set[int]:
    """Cells of a grid of which at least half is in the box of one object that moves at ``second``."""
    width, height = truth.width / columns, truth.height / rows
    found: set[int] = set()
    for each in truth.at(second):
        left, top, right, bottom = each.box
        if not each.moving:
            continue
        for cell in range(rows * columns):
            row, column = divmod(cell, columns)
            across = min(right, (column + 1) * width) - max(left, column * width)
            down = min(bottom, (row + 1) * height) - max(top, row * height)
            if across > 0 and down > 0 and across * down >= _COVERED * width * height:
                found.add(cell)
    return found


def _row(
    chunks: Sequence[KVChunk], cells: Sequence[set[int]], compressor: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """A memory filled with frames, of which ``cells`` show moving objects."""
    spec = MemorySpec(compressor=compressor, compressor_options=options, cap_bytes=_ROOM, block_frames=_BLOCK)
    memory = StreamMemory(CAMERA, spec, TierStack([Arena(_ROOM, evicts=False)]))
    tokens = sum(chunk.tokens for chunk in chunks)
    quarter = _QUARTER * tokens
    for chunk in chunks:
        memory.accept_chunk(chunk)
        if memory.settle_due or chunk is chunks[-1]:
            memory.settle()
            held = memory.heads[0][0].tokens
            if held > quarter:
                compress(memory, _TARGET * quarter / held)
    # A fresh memory numbers its frames from 0.
    wanted = {
        (number, cell)
        for number, (chunk, shown) in enumerate(zip(chunks, cells, strict=True))
        for cell in shown.intersection(chunk.cell.tolist())
    }
    heads = [head for _, _, head in memory.iter_heads()]
    kept = [len(wanted.intersection(zip(head.frame.tolist(), head.cell.tolist(), strict=True))) for head in heads]
    memory.tiers.close()
    return {
        "tokens": tokens,
        "held": sum(head.tokens for head in heads) / len(heads) / tokens,
        "object": len(wanted) / tokens,
        "compressions": memory.counts.compressions,
        "object_kept": sum(kept) / len(heads) / max(1, len(wanted)),
    }
