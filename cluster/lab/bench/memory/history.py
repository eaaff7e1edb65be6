"""Whether a question takes longer the more is remembered: time to the first token at much and at little history.

Made KV of the model's shape in host memory, nothing compressed, and a retriever that reads the same number of tokens
however many there are. Questions to both take turns.
"""

import argparse
import statistics
import sys
import time
from typing import Any

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError
from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.footage import CAMERA, QUESTIONS, Footage, made_chunks
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.types import AskSpec, MemorySpec

READ = 512
"""Tokens of each layer and head that a question reads, at least."""

_ROWS, _COLUMNS = 4, 8
_ROOM = 2**31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument(
        "--history",
        type=int,
        nargs=2,
        default=(4096, 65536),
        metavar=("LITTLE", "MUCH"),
        help="tokens of a layer and head in part history (default: 4096 65536)",
    )


def measure(footage: Footage) -> Part:
    """Figure ``ttft_64k_over_4k``, named by what ``args.history`` is by default.

    Raises:
        ConfigError: a history of less than one block of frames.
    """
    args = footage.args
    model = footage.model(args.model)
    little, much = args.history
    frame, block = _ROWS * _COLUMNS, MemorySpec().block_frames
    if not frame * block <= little < much:
        raise ConfigError(f"--history takes two numbers, {frame * block} or more and the second larger")
    engines = {tokens: _remembering(model, tokens) for tokens in (little, much)}
    asked: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in engines}
    for number in range(1 + len(QUESTIONS) * args.repeats):
        for tokens, (engine, _) in engines.items():
            run = engine.ask(AskSpec(CAMERA, QUESTIONS[number % len(QUESTIONS)], max_new_tokens=1))
            while run.step() is not None:
                pass
            # The first question of each finds everything cold.
            if number:
                stats = run.retrieval.stats
                asked[tokens].append((run.result.first_token_s, stats.fetched_tokens))
    rows: list[dict[str, Any]] = []
    for tokens, (engine, build_s) in engines.items():
        memory, _ = engine.memories.get_memory(CAMERA)  # type: ignore[union-attr]
        tables = [head.organiser.table for heads in memory.heads for head in heads]
        rows.append(
            {
                "history": tokens,
                "mib": sum(memory.tiers.usage(CAMERA).values()) / 2**20,
                "clusters": sum(map(len, tables)) / len(tables),
                "read": statistics.fmean(read for _, read in asked[tokens]) / len(tables),
                "ttft_ms": statistics.median(seconds for seconds, _ in asked[tokens]) * 1000,
                "ttft_worst_ms": max(seconds for seconds, _ in asked[tokens]) * 1000,
                "build_s": build_s,
            }
        )
    note = (
        f"tokens of each layer and head; read: {READ} at least, with whole clusters of {MemorySpec().organiser}; "
        f"model {args.model}"
    )
    return Part({"ttft_64k_over_4k": rows[1]["ttft_ms"] / rows[0]["ttft_ms"]}, rows, [note])


def _remembering(model: VisionLanguageModel, tokens: int) -> tuple[NativeEngine, float]:
    """An engine whose one camera has so much behind it, and the seconds that taking it in took."""
    bank = MemoryBank(TierStack([Arena(_ROOM)]))
    engine = NativeEngine(model, memories=bank)
    bank.open_stream(
        CAMERA, MemorySpec(compressor="none", retriever="top_k", retriever_options={"tokens": READ}, cap_bytes=_ROOM)
    )
    config = model.text_config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    chunks = made_chunks(
        CAMERA,
        tokens // (_ROWS * _COLUMNS),
        layers=len(model.layers),
        heads=config.num_key_value_heads,
        rows=_ROWS,
        columns=_COLUMNS,
        width=width,
    )
    seconds = 0.0
    for chunk in chunks:
        began = time.perf_counter()
        bank.accept_chunk(chunk)
        bank.schedule_saves()
        # Frames that come faster than they can be put away would be dropped.
        bank.wait_written()
        seconds += time.perf_counter() - began
    print(f"history: {tokens} tokens", file=sys.stderr)
    return engine, seconds
