"""Positions of every token of every window, against the rules that checkpoints were trained with, written by hand.

Clips at four frame rates go through the real codec processor, patch sampler and engine; steady, with a rung change and
with lost packets. The rules below walk over a window token by token and share no code with the models.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
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
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel
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
    """A frame of a window: ``time_s`` since the window's first frame, its merged grid, and the kept ``cells`` in their
    order; (-1, k) is the k-th text token around the frame."""

    time_s: Fraction
    rows: int
    columns: int
    cells: Sequence[Cell]


def qwen2_5_vl(system: int, frames: Sequence[SeenFrame], question: int, tokens_per_second: int) -> list[Position]:
    """Qwen2.5-VL: a video token stands at (time, row, column) counted from the end of the text before it; the text
    behind the video goes on after the largest of all those numbers (arXiv 2409.12191, 2.1; 2502.13923, 2.1.2)."""
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
    """Qwen2-VL: as Qwen2.5-VL, but time is the frame's number, whatever the pace (arXiv 2409.12191, 2.1)."""
    del tokens_per_second
    numbered = [replace(frame, time_s=Fraction(number)) for number, frame in enumerate(frames)]
    return qwen2_5_vl(system, numbered, question, 1)


def _one_after_the_other(system: int, frames: Sequence[SeenFrame], question: int, *, square: bool) -> list[Position]:
    """A plain sequence of text and pictures. ``square``: a picture is one of its longer side, and its tokens stand at
    (0, row, column) from its beginning; otherwise all of them follow each other."""
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


def qwen3_vl(system: int, frames: Sequence[SeenFrame], question: int, tokens_per_second: int) -> list[Position]:
    """Qwen3-VL (arXiv 2511.21631, 2)."""
    del tokens_per_second
    return _one_after_the_other(system, frames, question, square=True)


def internvl(system: int, frames: Sequence[SeenFrame], question: int, tokens_per_second: int) -> list[Position]:
    """InternVL: every frame takes the place of all its tokens whatever is kept of it."""
    del tokens_per_second
    return _one_after_the_other(system, frames, question, square=False)


Rule = Callable[[int, Sequence[SeenFrame], int, int], list[Position]]
RULES: dict[str, Rule] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
    "internvl": internvl,
    "llava_next_video": internvl,
    "llava_onevision": internvl,
}


def measure(seed: int) -> BenchResult:
    """See :mod:`cluster.lab.bench.faults`."""
    wrong = 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for rate, fps in RATES.items():
            clip = Path(folder) / f"{rate}.mp4"
            make_clip("street", clip, seconds=SECONDS, fps=fps, size=(160, 96), seed=seed)
            for preset in (name for name in PRESETS if name.startswith("tiny-")):
                model = load_model(preset)
                for case in CASES:
                    counts = _judged(model, case, list(_samples(clip, model, case)))
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


class _Watched(NativeEngine):
    """The engine, which also notes the frames of its windows and the positions their slots were rotated to."""

    def __init__(self, model: VisionLanguageModel) -> None:
        super().__init__(model)
        self.windows: list[tuple[Sequence[StreamFrame], Tensor]] = []

    def _plan(self, each: WindowWork) -> WindowPlan:
        plan = super()._plan(each)
        places = plan.places
        asked = [places.next + at for tail in plan.tails for at in range(tail.tokens)]
        frames = own_positions(plan.frames)
        own = torch.cat([places.text(range(places.system)), frames, places.text(asked)], dim=1)
        # Only distances matter: the stream's own time, counted from the window's beginning.
        self.windows.append((plan.frames, own - torch.tensor(places.axes)[:, None] * places.first + places.system))
        return plan


def _judged(model: VisionLanguageModel, case: str, samples: Sequence[FrameSample]) -> dict[str, int]:
    """Counts over all windows of these samples, of every length, in the native engine and as vLLM gets them."""
    windows = tokens = wrong = wrong_vllm = 0
    for window_s in WINDOWS_S:
        engine = _Watched(model)
        engine.admit(StreamSpec("camera", (QUESTION,), window_s=window_s, stride_s=8.0, static_gate=False))
        for sample in samples:
            engine.step(engine.push(sample))
        for frames, given in engine.windows:
            expected = _expected(model, frames, case)
            windows, tokens = windows + 1, tokens + len(expected)
            wrong += _differing(given, expected)
            wrong_vllm += _differing(_for_vllm(model, frames), expected)
    return {"windows": windows, "tokens": tokens, "wrong": wrong, "wrong_vllm": wrong_vllm}


def _expected(model: VisionLanguageModel, frames: Sequence[StreamFrame], case: str) -> list[Position]:
    times = [Fraction(frame.pts - frames[0].pts, MICROSECONDS) for frame in frames]
    if case != "gap":
        # Where nothing is lost, frames stand at the camera's nominal pace, however its clock is rounded.
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
    """The whole prompt's positions as the model registered with vLLM computes them from what we send it."""
    system, question = len(model.system_ids()), len(model.question_ids(QUESTION.text))
    window = model.window_positions(system, frame_spans(frames))
    items, offset = [], system
    for positions in window.frames:
        items.append((offset, positions, -1))
        offset += positions.shape[1]
    # The question's first token is an item too.
    items.append((offset, torch.full((3, 1), window.next), window.next + 1))
    return prompt_positions(offset + question, items)[0]


def _differing(given: Tensor, expected: Sequence[Position]) -> int:
    """Tokens whose position differs on any axis, and those that only one of the two has."""
    hand = torch.tensor(expected).T
    both = min(given.shape[1], hand.shape[1])
    return int((given[:, :both] != hand[:, :both]).any(0).sum()) + abs(given.shape[1] - hand.shape[1])
