"""Question latency as a function of history length, on synthetic KV of the model's shape; questions over long and short
histories alternate.

Part ``history``: uncompressed in host memory, with a retriever that reads a fixed number of tokens. Part ``day``: a day
of one camera in production's memory at its default cap, with its attention-guided retriever: bytes held, and the cost
of a question after hours over one after minutes. Frames arrive at the rate of a busy synthetic street (part
``evidence``: 12 tokens per second), into a tier that is limited to the cap and counts all bytes: blocks, index and
manifest.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult, print_progress
from cluster.lab.bench.memory.footage import CAMERA, QUESTIONS, Footage, add_written, model_chunks, run_question
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.types import MemorySpec

READ = 512
"""Minimum tokens per layer and head that a question reads in part history."""

_ROWS, _COLUMNS = 4, 8
_DAY_ROWS, _DAY_COLUMNS = 3, 4
_SLAB = 64 * 2**10
_CAP = 2**31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of part history to the parser."""
    parser.add_argument(
        "--day-seconds",
        type=int,
        default=86_400,
        metavar="S",
        help="length of part day (default takes 20 min); questions after a third of it",
    )
    parser.add_argument(
        "--history",
        type=int,
        nargs=2,
        default=(4096, 65536),
        metavar=("SHORT", "LONG"),
        help="tokens per layer and head in part history (default: 4096 65536)",
    )


def measure_history(footage: Footage) -> BenchResult:
    """Figure ``ttft_64k_over_4k``, named after the default of ``args.history``. Raises ``ConfigError`` for a history of
    less than one block of frames."""
    args = footage.args
    model = footage.model(args.model)
    short, long = args.history
    frame, block = _ROWS * _COLUMNS, MemorySpec().block_frames
    if not frame * block <= short < long:
        raise ConfigError(f"--history takes two numbers of {frame * block} or more, the second larger")
    spec = MemorySpec(compressor="none", retriever="top_k", retriever_options={"tokens": READ}, cap_bytes=_CAP)
    engines: dict[int, NativeEngine] = {}
    build_s: dict[int, float] = {}
    for tokens in (short, long):
        engine = engines[tokens] = _engine(model, Arena(_CAP), spec)
        build_s[tokens] = 0.0
        for chunk in model_chunks(model, tokens // frame, rows=_ROWS, columns=_COLUMNS):
            began = time.perf_counter()
            add_written(_bank(engine), chunk)
            build_s[tokens] += time.perf_counter() - began
        print_progress(f"history: {tokens} tokens")
    asked = _ask_in_turns(engines, args.repeats)
    rows: list[dict[str, Any]] = []
    for tokens, engine in engines.items():
        memory = _memory(engine)
        tables = [head.organiser.table for heads in memory.heads for head in heads]
        times, read = zip(*asked[tokens], strict=True)
        rows.append(
            {
                "history": tokens,
                "mib": sum(memory.tiers.usage(CAMERA).values()) / 2**20,
                "clusters": sum(map(len, tables)) / len(tables),
                "read": statistics.fmean(read) / len(tables),
                "ttft_ms": statistics.median(times) * 1000,
                "ttft_worst_ms": max(times) * 1000,
                "build_s": build_s[tokens],
            }
        )
    note = (
        f"tokens per layer and head; read: at least {READ}, in whole clusters of {MemorySpec().organiser}; "
        f"model {args.model}"
    )
    return BenchResult({"ttft_64k_over_4k": rows[1]["ttft_ms"] / rows[0]["ttft_ms"]}, rows, [note])


def measure_day(footage: Footage) -> BenchResult:
    """Figures ``ttft_8h_over_10min`` and ``bytes_per_camera_day`` (share of the cap, which the tier enforces), named
    after the default day, and ``memory_lost`` (see part cap). Raises ``ConfigError`` if the day is too short."""
    args = footage.args
    spec, seconds = MemorySpec(), args.day_seconds
    minutes, hours = seconds // 144, seconds // 3
    if not minutes:
        raise ConfigError("--day-seconds must be at least 144: the short history is a 144th of it")
    model = footage.model(args.model)
    engines: dict[int, NativeEngine] = {}
    frames: dict[int, Iterator[KVChunk]] = {}
    for span in (minutes, hours):
        # Twice the cap, because slabs may be partly empty; the stream itself is limited to the cap.
        tier = Arena(2 * spec.cap_bytes, stream_bytes=spec.cap_bytes, evicts=False, slab_bytes=_SLAB)
        engines[span] = _engine(model, tier, spec)
        frames[span] = model_chunks(model, seconds, rows=_DAY_ROWS, columns=_DAY_COLUMNS)
    rows = [_store_frames(engines[span], frames[span], span) for span in engines]
    asked = _ask_in_turns(engines, args.repeats)
    for row in rows:
        row["ttft_ms"] = statistics.median(first_s for first_s, _ in asked[row["seconds"]]) * 1000
    print_progress(f"day: first token after hours over minutes {rows[1]['ttft_ms'] / rows[0]['ttft_ms']:.2f}")
    rows.append(_store_frames(engines[hours], frames[hours], seconds - hours))
    figures = {
        "ttft_8h_over_10min": rows[1]["ttft_ms"] / rows[0]["ttft_ms"],
        "bytes_per_camera_day": max(row["most_mib"] for row in rows) * 2**20 / spec.cap_bytes,
        "memory_lost": float(rows[0]["lost"] + rows[2]["lost"]),
    }
    cap = f"cap {spec.cap_bytes / 2**20:g} MiB, most_mib: largest at any time"
    note = f"{cap}; {spec.compressor}, {spec.organiser}, {spec.retriever}; model {args.model}"
    return BenchResult(figures, rows, [note])


def _engine(model: VisionLanguageModel, tier: Arena, spec: MemorySpec) -> NativeEngine:
    bank = MemoryBank(TierStack([tier]))
    bank.open_stream(CAMERA, spec)
    return NativeEngine(model, memories=bank)


def _bank(engine: NativeEngine) -> MemoryBank:
    assert engine.memories is not None
    return engine.memories


def _memory(engine: NativeEngine) -> StreamMemory:
    return _bank(engine).get_memory(CAMERA)[0]


def _ask_in_turns(engines: Mapping[int, NativeEngine], repeats: int) -> dict[int, list[tuple[float, int]]]:
    """Ask all questions ``repeats`` times, alternating engines; per engine, TTFT seconds and tokens fetched. The first
    question runs on cold caches and does not count."""
    asked: dict[int, list[tuple[float, int]]] = {name: [] for name in engines}
    for number in range(1 + len(QUESTIONS) * repeats):
        for name, engine in engines.items():
            run = run_question(engine, QUESTIONS[number % len(QUESTIONS)])
            if number:
                asked[name].append((run.result.first_token_s, run.retrieval.stats.fetched_tokens))
    return asked


def _store_frames(engine: NativeEngine, chunks: Iterator[KVChunk], seconds: int) -> dict[str, Any]:
    """Store ``seconds`` more frames, one per second of camera time; returns a row of what is held."""
    memory, most = _memory(engine), 0
    for chunk in itertools.islice(chunks, seconds):
        add_written(_bank(engine), chunk)
        most = max(most, sum(memory.tiers.usage(CAMERA).values()))
        if (chunk.index + 1) % 3600 == 0:
            print_progress(f"day: hour {(chunk.index + 1) // 3600}")
    return {
        "seconds": chunk.index + 1,
        "tokens": memory.tokens // max(1, sum(map(len, memory.heads))),
        "frames": memory.frames,
        "compressions": memory.counts.compressions,
        "lost": memory.counts.lost + memory.counts.frames_dropped,
        "most_mib": most / 2**20,
    }
