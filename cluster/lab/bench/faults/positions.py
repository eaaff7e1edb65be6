"""Checks the position of every token of every window against the rules that checkpoints were trained with.

Clips at four frame rates, steady, with a rung change, and with lost packets, go through the real codec processor, patch
sampler and engine. The rules below are independent implementations that walk over a window token by token.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.codec.file import FileSource
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.engine.native import NativeEngine
from cluster.engine.native.plan import WindowPlan
from cluster.engine.vllm.positions import prompt_positions
from cluster.engine.window.step import WindowWork
from cluster.engine.window.stream import StreamFrame, encoded_tokens, frame_spans, own_positions
from cluster.lab.bench.harness import BenchResult
from cluster.lab.scenes.street_clips import make_clip
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS
from cluster.types import MICROSECONDS, EncodedPacket, FrameSample, Question, StreamSpec
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

RATES = {"2": 2.0, "12.5": 12.5, "23.976": 24000 / 1001, "29.97": 30000 / 1001}
WINDOWS_S = (8.0, 24.0, 40.0, 60.0)
CASES = ("steady", "rung", "gap")
SECONDS = 70.0
RUNG_AT_S, RUNG_BACK_S = 22.0, 46.0
LOST_S = ((19.0, 20.0), (47.3, 48.3))
QUESTION = Question("q", "Is anyone climbing the fence?")

Position = tuple[int, int, int]
Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SeenFrame:
    """A frame of a window: ``time_s`` since the window's first frame, its merged grid, and the kept ``cells`` in order;
    (-1, k) is the k-th text token around the frame."""

    time_s: Fraction
    rows: int
    columns: int
    cells: Sequence[Cell]


def qwen2_5_vl(system: int, frames: Sequence[SeenFrame], question: int, tokens_per_second: int) -> list[Position]:
    """Qwen2.5-VL: a video token is at (time, row, column), offset by the end of the text before it; text after the
    video continues after the largest of these numbers (arXiv 2409.12191, 2.1; 2502.13923, 2.1.2)."""
    positions = [(at, at, at) for at in range(system)]
    largest = system - 1
    for frame in frames:
        time = int(frame.time_s * tokens_per_second + Fraction(1, 2))
        for row in range(frame.rows):
            for column in range(frame.columns):
                largest = max(largest, system + time, system + row, system + column)
        positions += [(system + time, system + row, system + column) for row, column in frame.cells]
    return positions + [(largest + 1 + at,) * 3 for at in range(question)]


def qwen2_vl(system: int, frames: Sequence[SeenFrame], question: int, tokens_per_second: int) -> list[Position]:
    """Qwen2-VL: like Qwen2.5-VL, but time is the frame number regardless of frame rate (arXiv 2409.12191, 2.1)."""
    del tokens_per_second
    numbered = [replace(frame, time_s=Fraction(number)) for number, frame in enumerate(frames)]
    return qwen2_5_vl(system, numbered, question, 1)


def sequential(
    system: int, frames: Sequence[SeenFrame], question: int, tokens_per_second: int, *, square: bool
) -> list[Position]:
    """Text and pictures in sequence, whatever the time. ``square``: a picture advances the position by its longer side,
    and its tokens are at (0, row, column) from its start, as in Qwen3-VL (arXiv 2511.21631, 2); otherwise every frame
    takes up the positions of all its tokens, however many are kept, as in InternVL."""
    del tokens_per_second
    written = next((frame.cells for frame in frames if frame.cells), [])
    before = list(itertools.takewhile(lambda cell: cell[0] < 0, written))
    behind = [cell for cell in written[len(before) :] if cell[0] < 0]
    positions = [(at, at, at) for at in range(system)]
    following = system
    for frame in frames:
        places: dict[Cell, Position] = {cell: (following + at,) * 3 for at, cell in enumerate(before)}
        following += len(before)
        for at, (row, column) in enumerate(itertools.product(range(frame.rows), range(frame.columns))):
            place = (0, row, column) if square else (at, at, at)
            places[row, column] = (following + place[0], following + place[1], following + place[2])
        following += max(frame.rows, frame.columns) if square else frame.rows * frame.columns
        places |= {cell: (following + at,) * 3 for at, cell in enumerate(behind)}
        following += len(behind)
        positions += [places[cell] for cell in frame.cells]
    return positions + [(following + at,) * 3 for at in range(question)]


Rule = Callable[[int, Sequence[SeenFrame], int, int], list[Position]]
RULES: dict[str, Rule] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": partial(sequential, square=True),
    **dict.fromkeys(("internvl", "llava_next_video", "llava_onevision"), partial(sequential, square=False)),
}


def measure(seed: int) -> BenchResult:
    """Figure ``positions_wrong``: wrong tokens over all clips, families and cases, natively and for vLLM."""
    wrong = 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for rate, fps in RATES.items():
            clip = Path(folder) / f"{rate}.mp4"
            make_clip("street", clip, seconds=SECONDS, fps=fps, size=(160, 96), seed=seed)
            for preset in (name for name in PRESETS if name.startswith("tiny-")):
                model = load_model(preset)
                for case in CASES:
                    counts = _count_wrong(model, case, list(_samples(clip, model, case)))
                    rows.append({"family": model.family, "fps": rate, "case": case, **counts})
                    wrong += counts["wrong"] + counts["wrong_vllm"]
    return BenchResult({"positions_wrong": float(wrong)}, rows)


def _samples(clip: Path, model: VisionLanguageModel, case: str) -> Iterator[FrameSample]:
    source = FileSource(clip)
    processor = CodecProcessor(model.geometry, CodecOptions())
    processor.open(source.open())
    sampler = PatchSampler("camera", make_pruner("replenish"), 2.0)
    rate = 2.0
    for packet in source.packets():
        seconds = _seconds(packet)
        if case == "gap" and any(begin <= seconds < end for begin, end in LOST_S):
            continue
        wanted = 1.0 if case == "rung" and RUNG_AT_S <= seconds < RUNG_BACK_S else 2.0
        if wanted != rate:
            rate = wanted
            processor.change_fps(rate)
            sampler.reconfigure(prune=1.0, fps=rate)
        for frame in processor.feed(packet):
            sample = sampler.feed(frame)
            if sample is not None:
                yield sample


def _seconds(packet: EncodedPacket) -> float:
    return (packet.pts or 0) / MICROSECONDS


class _RecordingEngine(NativeEngine):
    """An engine that records each window's frames and the positions to which its slots were rotated."""

    def __init__(self, model: VisionLanguageModel) -> None:
        super().__init__(model)
        self.windows: list[tuple[Sequence[StreamFrame], Tensor]] = []

    def _plan(self, each: WindowWork) -> WindowPlan:
        plan = super()._plan(each)
        places = plan.places
        asked = [places.next + at for tail in plan.tails for at in range(tail.tokens)]
        frames = own_positions(plan.frames)
        own = torch.cat([places.text(range(places.system)), frames, places.text(asked)], dim=1)
        # Only distances matter: convert stream time to time since the window's start.
        self.windows.append((plan.frames, own - torch.tensor(places.axes)[:, None] * places.first + places.system))
        return plan


def _count_wrong(model: VisionLanguageModel, case: str, samples: Sequence[FrameSample]) -> dict[str, int]:
    """Count wrong positions over windows of every length, in the native engine and as sent to vLLM."""
    windows = tokens = wrong = wrong_vllm = 0
    for window_s in WINDOWS_S:
        engine = _RecordingEngine(model)
        engine.admit(StreamSpec("camera", (QUESTION,), window_s=window_s, stride_s=8.0, static_gate=False))
        for sample in samples:
            engine.step(engine.push(sample))
        for frames, given in engine.windows:
            expected = _expected(model, frames, case)
            windows, tokens = windows + 1, tokens + len(expected)
            wrong += _count_differing(given, expected)
            wrong_vllm += _count_differing(_for_vllm(model, frames), expected)
    return {"windows": windows, "tokens": tokens, "wrong": wrong, "wrong_vllm": wrong_vllm}


def _expected(model: VisionLanguageModel, frames: Sequence[StreamFrame], case: str) -> list[Position]:
    times = [Fraction(frame.pts - frames[0].pts, MICROSECONDS) for frame in frames]
    if case != "gap":
        # Without losses, frames are at the nominal rate, however timestamps are rounded.
        times = [Fraction(sum(before.duration for before in frames[:i]), MICROSECONDS) for i in range(len(frames))]
    seen = [
        SeenFrame(
            time,
            frame.grid.group_rows,
            frame.grid.group_cols,
            [(r, c) for r, c in encoded_tokens(frame).cells.tolist()],
        )
        for time, frame in zip(times, frames, strict=True)
    ]
    config: Any = model.model.config
    system, question = len(model.system_ids()), len(model.question_ids(QUESTION.text))
    return RULES[model.family](system, seen, question, getattr(config.vision_config, "tokens_per_second", 0))


def _for_vllm(model: VisionLanguageModel, frames: Sequence[StreamFrame]) -> Tensor:
    """Positions of the whole prompt as the model registered with vLLM computes them from our input."""
    system, question = len(model.system_ids()), len(model.question_ids(QUESTION.text))
    window = model.window_positions(system, frame_spans(frames))
    items, offset = [], system
    for positions in window.frames:
        items.append((offset, positions, -1))
        offset += positions.shape[1]
    # The question's first token is an item, too.
    items.append((offset, torch.full((3, 1), window.next), window.next + 1))
    return prompt_positions(offset + question, items)[0]


def _count_differing(given: Tensor, expected: Sequence[Position]) -> int:
    """Number of tokens whose position differs on any axis, plus the difference in length."""
    hand = torch.tensor(expected).T
    both = min(given.shape[1], hand.shape[1])
    return int((given[:, :both] != hand[:, :both]).any(0).sum()) + abs(given.shape[1] - hand.shape[1])
