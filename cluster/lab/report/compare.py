"""Compares full computation with ours on the same windows of a clip, in one process."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.codec import FileSource
from cluster.codec.processor import CodecProcessor
from cluster.decoder.footage.pictures import to_jpeg
from cluster.engine.base import Engine
from cluster.engine.native.engine import NativeEngine
from cluster.engine.window.windows import window_time
from cluster.lab.report.records import ComparedWindow, Cost, SampleFrame
from cluster.types import MICROSECONDS, Answer, FrameSample, SampledPicture, StreamSpec, WindowRequest
from cluster.vision.sampler import overlay


def video_samples(path: Path, processor: CodecProcessor) -> Iterator[SampledPicture]:
    """Samples of a video file, decoded like a camera's. Raises ``SourceError``: it cannot be read to its end."""
    source = FileSource(path)
    try:
        processor.open(source.open())
        for packet in source.packets():
            yield from processor.feed(packet)
        yield from processor.drain()
    finally:
        source.close()


def compare(
    engine: NativeEngine,
    spec: StreamSpec,
    pruned: Sequence[FrameSample],
    whole: Sequence[FrameSample],
    on_window: Callable[[], None] = lambda: None,
) -> list[ComparedWindow]:
    """Answer every window after the first whole one in both ways, alternating: ours, then in full from scratch.

    ``pruned``: frames after our pruner; ``whole``: the same frames unpruned; ``on_window``: called after each compared
    window.
    """
    found: list[ComparedWindow] = []
    engine.evict(spec.stream)
    engine.admit(spec)
    for sample in pruned:
        for request in engine.push(sample):
            answers, ours = _step(engine, request)
            if request.end - whole[0].pts <= round(spec.window_s * MICROSECONDS):
                continue
            full_answers, full = answer_in_full(engine, spec, whole, request)
            found.append(
                ComparedWindow(
                    start_s=(request.start - whole[0].pts) / MICROSECONDS,
                    end_s=(request.end - whole[0].pts) / MICROSECONDS,
                    full=full,
                    ours=ours,
                    gated=any(answer.gated for answer in answers),
                    full_scores={answer.question: answer.score for answer in full_answers},
                    our_scores={answer.question: answer.score for answer in answers},
                )
            )
            on_window()
    engine.evict(spec.stream)
    return found


def count_windows(spec: StreamSpec, seconds: float) -> int:
    """Number of windows that :func:`compare` compares in ``seconds`` of video."""
    return max(0, int((seconds - spec.window_s) / spec.stride_s + 1e-6))


def picture_frames(frames: Sequence[tuple[FrameSample, SampledPicture]], count: int) -> tuple[SampleFrame, ...]:
    """At most ``count`` frames with their keep-mask drawn over: the first anchor, and from equal stretches of the clip
    the pruned frame that keeps most, since most frames of a quiet street keep almost nothing."""
    anchors = [pair for pair in frames if pair[0].anchor][:1]
    others = [pair for pair in frames if not pair[0].anchor]
    wanted = min(count - len(anchors), len(others))
    edges = [round(i * len(others) / wanted) for i in range(wanted + 1)] if wanted else []
    picked = [max(others[a:b], key=lambda pair: pair[0].mask.mean()) for a, b in itertools.pairwise(edges)]
    return tuple(
        SampleFrame(
            time_s=(sample.pts - frames[0][0].pts) / MICROSECONDS,
            kept=float(sample.mask.mean()),
            anchor=sample.anchor,
            jpeg=to_jpeg(overlay(frame.rgb, sample.mask)),
        )
        for sample, frame in anchors + picked
    )


def _step(engine: NativeEngine, request: WindowRequest) -> tuple[list[Answer], Cost]:
    began = time.perf_counter()
    answers = engine.step([request])
    seconds = time.perf_counter() - began
    computed = sum(window.tokens.computed for window in engine.stats.windows)
    return answers, Cost(computed, seconds, float(engine.stats.tower_flops + engine.stats.llm_flops))


def answer_in_full(
    engine: NativeEngine, spec: StreamSpec, whole: Sequence[FrameSample], request: WindowRequest
) -> tuple[list[Answer], Cost]:
    """Answer a window on a fresh stream: every frame passes through tower and language model.

    ``whole``: unpruned frames. Leaves ``engine.stats`` with that window's statistics.
    """
    stream = f"{spec.stream} in full"
    alone = replace(spec, stream=stream, refresh="all", refresh_budget=None, static_gate=False)
    answers, cost = _step(engine, push_window(engine, alone, whole, request))
    engine.evict(stream)
    return answers, cost


def push_window(
    engine: Engine, spec: StreamSpec, samples: Iterable[FrameSample], window: WindowRequest
) -> WindowRequest:
    """Admit a stream, push only the frames of ``window``, and return the request for a window of all of them."""
    # The stride is as long as the window. With a shorter one the last window might not close (if the window is not a
    # multiple of it, or its first frame comes after its start), and the last one that closed would lack frames.
    engine.admit(replace(spec, stride_s=spec.window_s))
    closed: list[WindowRequest] = []
    for sample in samples:
        if window.start <= window_time(sample) < window.end:
            closed += engine.push(replace(sample, stream=spec.stream))
    return (closed or engine.flush(spec.stream))[-1]
