"""Answers the questions about a recorded scene under one setting, from a fresh memory filled with its KV.

For each instant at which questions are asked, a memory is filled from the start, with the cap that its share amounts to
then. The window's KV is added and the memory settled, so that answers rest on capped memory alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from cluster.engine.native.engine import NativeEngine
from cluster.errors import NotReadyError
from cluster.lab.evaluation.memory.questions import Question
from cluster.lab.evaluation.memory.recording import STREAM, Recording
from cluster.lab.evaluation.memory.results import (
    AnswerRecord,
    GradedAnswer,
    credit,
    evidence_recall,
    words,
)
from cluster.lab.evaluation.memory.settings import ShareSetting
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk, LayerKV
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.types import MICROSECONDS, AskResult, AskSpec

SHORT_ANSWER, LONG_ANSWER = 8, 48

# The tier must never run out: each slab holds cells of one of some forty sizes, and block sizes are rounded up. Memory
# is reserved as the tier fills.
_ROUNDING = 8
_SLABS = 256 * 2**20


@dataclass(frozen=True, slots=True)
class SceneAnswers:
    """Answers to all questions of one scene under one setting; ``incomplete``: number of answers for which parts of the
    memory were late or lost."""

    answered: tuple[AnswerRecord, ...]
    incomplete: int = 0


_SAVED = TypeAdapter(SceneAnswers)


def read_answers(body: dict[str, Any], video: str, questions: Sequence[Question]) -> SceneAnswers:
    """Inverse of ``asdict``; grades the answers again and attributes them to ``video``. Raises ``ValueError``: invalid,
    or a different number of questions."""
    found = _SAVED.validate_python(body)
    graded = (
        replace(each, judged=GradedAnswer(video, number, question.kind, credit(question, each.said)))
        for number, (question, each) in enumerate(zip(questions, found.answered, strict=True))
    )
    return replace(found, answered=tuple(graded))


def answer_scene(
    engine: NativeEngine, recording: Recording, video: str, questions: Sequence[Question], setting: ShareSetting
) -> SceneAnswers:
    """Fill memories from the recording and ask the questions.

    ``engine``: of the model that computed the KV; its memories are replaced. ``video``: name to report answers under.
    Raises ``ValueError``: the recording lacks a question's instant.
    """
    instants = {instant.at_s: number for number, instant in enumerate(recording.instants)}
    lacking = {question.at_s for question in questions} - instants.keys()
    if lacking:
        raise ValueError(f"the recording of {video} lacks the question instant {min(lacking):g} s")
    found: dict[int, AnswerRecord] = {}
    incomplete = 0
    for at_s in sorted({question.at_s for question in questions}):
        chunks = recording.seen(instants[at_s])
        engine.memories, memory = filled_memory(chunks, setting, recording.instants[instants[at_s]].queries)
        asked = [(number, question) for number, question in enumerate(questions) if question.at_s == at_s]
        for number, question in asked:
            found[number], whole = _ask(engine, memory, recording, video, number, question)
            incomplete += not whole
        memory.tiers.close()
    return SceneAnswers(tuple(found[number] for number in range(len(questions))), incomplete)


def full_bytes(chunks: Sequence[KVChunk]) -> int:
    """Bytes of all KV of these frames, including each token's frame number and cell."""
    return sum(
        chunk.key.nbytes + chunk.value.nbytes + 8 * chunk.tokens * chunk.key.shape[0] * chunk.key.shape[1]
        for chunk in chunks
    )


def open_memory(chunks: Sequence[KVChunk], setting: ShareSetting) -> tuple[MemoryBank, StreamMemory]:
    """An empty memory sized for these frames and capped by ``setting``, alone in its bank's tier."""
    whole = full_bytes(chunks)
    tier_bytes = _SLABS + _ROUNDING * whole
    bank = MemoryBank(TierStack([Arena(tier_bytes, evicts=False)]))
    bank.open_stream(STREAM, setting.spec(frames=len(chunks), full_bytes=whole, tier_bytes=tier_bytes))
    return bank, bank.get_memory(STREAM)[0]


def filled_memory(
    chunks: Sequence[KVChunk], setting: ShareSetting, queries: Sequence[Tensor] = ()
) -> tuple[MemoryBank, StreamMemory]:
    """:func:`open_memory`, filled with these frames and settled. ``queries``: question rows, see
    :class:`~cluster.lab.evaluation.memory.recording.Instant`; every compression goes by them, as a camera's questions
    stay the same."""
    bank, memory = open_memory(chunks, setting)
    if queries:
        memory.observe_queries(queries)
    for chunk in chunks:
        # Not through the bank, which would restart a memory whose policy fails.
        memory.add_chunk(chunk)
    memory.settle()
    return bank, memory


def _ask(
    engine: NativeEngine, memory: StreamMemory, recording: Recording, video: str, number: int, question: Question
) -> tuple[AnswerRecord, bool]:
    """Ask one question; returns the answer, and whether all requested blocks of the memory were available."""
    turns: list[tuple[str, str]] = []
    results: list[AskResult] = []
    times: list[float] = []
    heads = max(1, sum(len(layer) for layer in memory.heads))
    bytes_held = memory.held_bytes
    for text, truth in zip(question.turns, question.answers, strict=True):
        ask = AskSpec(
            stream=STREAM,
            text=text,
            turns=tuple(turns),
            since_s=_since(memory, recording, question),
            max_new_tokens=SHORT_ANSWER if len(words(truth)) <= 1 else LONG_ANSWER,
        )
        try:
            run = engine.ask(ask)
        except NotReadyError:
            # Asked before the first complete frame.
            turns.append((text, ""))
            continue
        while run.step() is not None:
            pass
        results.append(run.result)
        turns.append((text, run.result.text))
        # Only needed for evidence recall.
        for frame, count in run.retrieval.stats.tokens_by_frame().items() if question.evidence else ():
            middle = (memory.log.frame_time(frame) - recording.begin) / MICROSECONDS + recording.frame_s / 2
            times += [middle] * count
    asked = max(1, len(results))
    said = tuple(answer for _, answer in turns)
    answered = AnswerRecord(
        GradedAnswer(video, number, question.kind, credit(question, said)),
        said,
        history_s=question.at_s,
        ttft_s=sum(each.first_token_s for each in results) / asked,
        retrieved=sum(each.tokens_read for each in results) / asked / heads,
        held=sum(each.tokens_held for each in results) / asked / heads,
        bytes_moved=sum(each.bytes_read for each in results),
        bytes_held=bytes_held,
        recall=evidence_recall(times, question.evidence) if question.evidence else None,
        yes=tuple(each.yes for each in results),
    )
    emptied = memory.counts.frames and not memory.tokens
    return answered, not (any(each.degraded for each in results) or memory.counts.lost or emptied)


def _since(memory: StreamMemory, recording: Recording, question: Question) -> float | None:
    """``question.since_s`` as an age in seconds, relative to the newest frame."""
    if question.since_s is None or memory.newest is None:
        return None
    return max(0.0, (memory.newest - recording.begin) / MICROSECONDS - question.since_s)


def load_head_tokens(memory: StreamMemory, layer: int, h: int) -> LayerKV | None:
    """Tokens held by a head, in frame order; None if it holds none."""
    table = memory.heads[layer][h].organiser.table
    loaded = memory.block_loader(layer, h)(table.block.tolist())
    blocks = [each.block for each in loaded if each.block is not None]
    if not blocks:
        return None
    frame = torch.cat([block.frame for block in blocks]).to(torch.int64)
    order = frame.argsort(stable=True)
    cell = torch.cat([block.cell for block in blocks]).to(torch.int64)
    key, value = (torch.cat([getattr(block, name) for block in blocks])[order] for name in ("key", "value"))
    return LayerKV(key[None], value[None], frame[order][None], cell[order][None])
