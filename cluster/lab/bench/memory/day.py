"""A day of one camera in production's memory, at its default cap: bytes of all that is kept, and what a question after
hours costs over one after minutes.

KV is made, in the model's shape and at the pace of a busy drawn street (part ``evidence``: 12 tokens a second). A tier
that holds no more than the cap counts all its bytes: blocks, index and manifest. Questions after minutes and after
hours take turns, with production's retriever, whose reading follows the attention.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError
from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import CAMERA, QUESTIONS, Footage, made_chunks
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.types import AskSpec, MemorySpec

_ROWS, _COLUMNS = 3, 4
_SLAB = 64 * 2**10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument(
        "--day-seconds",
        type=int,
        default=86_400,
        metavar="S",
        help="of part day, 20 min of computing in all; questions after a third of it (default: %(default)s)",
    )


def measure(footage: Footage) -> Part:
    """Figures ``ttft_8h_over_10min`` and ``bytes_per_camera_day`` (share of the cap), named by the default day.

    Raises:
        ConfigError: the day is too short.
    """
    args = footage.args
    spec, seconds = MemorySpec(), args.day_seconds
    minutes, hours = seconds // 144, seconds // 3
    if not minutes:
        raise ConfigError("--day-seconds is at least 144, of which a 144th is a frame")
    model = footage.model(args.model)
    short, long = _engine(model), _engine(model)
    chunks = _chunks(model, seconds)
    rows = [_watch(short, _chunks(model, minutes), minutes), _watch(long, chunks, hours)]
    times: dict[int, list[float]] = {minutes: [], hours: []}
    for number in range(1 + len(QUESTIONS) * args.repeats):
        for watched, engine in zip(times, (short, long), strict=True):
            run = engine.ask(AskSpec(CAMERA, QUESTIONS[number % len(QUESTIONS)], max_new_tokens=1))
            while run.step() is not None:
                pass
            # The first question of each finds everything cold.
            if number:
                times[watched].append(run.result.first_token_s)
    for row in rows:
        row["ttft_ms"] = statistics.median(times[row["seconds"]]) * 1000
    print(f"day: first token after hours over minutes {rows[1]['ttft_ms'] / rows[0]['ttft_ms']:.2f}", file=sys.stderr)
    rows.append(_watch(long, chunks, seconds))
    figures = {
        "ttft_8h_over_10min": rows[1]["ttft_ms"] / rows[0]["ttft_ms"],
        "bytes_per_camera_day": max(row["most_mib"] for row in rows) * 2**20 / spec.cap_bytes,
    }
    cap = f"cap {spec.cap_bytes / 2**20:g} MiB, most_mib: largest at any time"
    note = f"{cap}; {spec.compressor}, {spec.organiser}, {spec.retriever}; model {args.model}"
    return Part(figures, rows, [note])


def _engine(model: VisionLanguageModel) -> NativeEngine:
    # Room for slabs that are partly empty; what the stream may hold is the cap.
    cap = MemorySpec().cap_bytes
    bank = MemoryBank(TierStack([Arena(2 * cap, stream_bytes=cap, evicts=False, slab_bytes=_SLAB)]))
    bank.open_stream(CAMERA, MemorySpec())
    return NativeEngine(model, memories=bank)


def _chunks(model: VisionLanguageModel, seconds: int) -> Iterator[KVChunk]:
    config = model.text_config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = {"layers": len(model.layers), "heads": config.num_key_value_heads, "width": width}
    return made_chunks(CAMERA, seconds, rows=_ROWS, columns=_COLUMNS, **shape)


def _watch(engine: NativeEngine, chunks: Iterator[KVChunk], until: int) -> dict[str, Any]:
    """Take in frames, one a second of the camera's time, up to this second; a row of what is held then."""
    assert engine.memories is not None
    bank, most = engine.memories, 0
    for chunk in chunks:
        bank.accept_chunk(chunk)
        bank.schedule_saves()
        # Frames that come faster than they can be put away would be dropped.
        bank.wait_written()
        memory, _ = bank.get_memory(CAMERA)
        most = max(most, sum(memory.tiers.usage(CAMERA).values()))
        if (chunk.index + 1) % 3600 == 0:
            print(f"day: hour {(chunk.index + 1) // 3600}", file=sys.stderr)
        if chunk.index + 1 == until:
            break
    return {
        "seconds": until,
        "tokens": memory.tokens // max(1, sum(map(len, memory.heads))),
        "frames": memory.frames,
        "compressions": memory.counts.compressions,
        "lost": memory.counts.lost + memory.counts.frames_dropped,
        "most_mib": most / 2**20,
    }
