"""``window_after_gap``: share of a 40 s window that the first answer after a packet loss of one second covers.

Packets go through the codec processor, pruner, sampler and a simulated engine, with one second of packets missing at a
random time. Frames before the next keyframe cannot be decoded either, so the share depends on the keyframe interval.
"""

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from cluster.codec import FileSource, StreamHeader
from cluster.codec.processor import CodecProcessor
from cluster.engine.simulated import SimulatedEngine
from cluster.lab.bench.harness import BenchResult
from cluster.lab.scenes.street_clips import make_clip
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_shape
from cluster.types import MICROSECONDS, EncodedPacket, FrameSample, Question, StreamSpec
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

LOSSES = 20
LOSS_S, WINDOW_S, STRIDE_S = 1.0, 40.0, 8.0
FPS, SECONDS = 10, 72
SIZE = 160, 120
KEYFRAMES_S = (1, 2, 4)
"""Seconds between keyframes; the figure is for the first."""


def measure(seed: int) -> BenchResult:
    """Figure ``window_after_gap``: mean over the losses."""
    random = np.random.default_rng(seed)
    shape = load_shape("demo")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for every_s in KEYFRAMES_S:
            clip = Path(folder) / f"{every_s}.mp4"
            make_clip("street", clip, seconds=SECONDS, fps=FPS, size=SIZE, seed=seed, gop_s=every_s)
            source = FileSource(clip)
            header, packets = source.open(), list(source.packets())
            shares = [
                _coverage_after_loss(shape, header, packets, at_s) for at_s in random.uniform(WINDOW_S, 60.0, LOSSES)
            ]
            rows.append(
                {
                    "keyframe_s": every_s,
                    "losses": LOSSES,
                    "held": round(fmean(shares), 4),
                    "least": round(min(shares), 4),
                }
            )
    note = f"loss of {LOSS_S:g} s of packets; the figure is for a keyframe every {KEYFRAMES_S[0]} s"
    return BenchResult({"window_after_gap": rows[0]["held"]}, rows, [note])


def _coverage_after_loss(
    shape: VisionLanguageModel, header: StreamHeader, packets: list[EncodedPacket], at_s: float
) -> float:
    """Share of the first window ending after the loss that is covered by the frames it holds."""
    engine = SimulatedEngine(shape)
    engine.admit(StreamSpec("gap", (Question("q", "Is anyone there?"),), WINDOW_S, STRIDE_S, static_gate=False))
    processor, sampler = CodecProcessor(shape.geometry), PatchSampler("gap", make_pruner("replenish"), 2.0)
    processor.open(header)
    sent: list[FrameSample] = []
    lost = at_s * MICROSECONDS, (at_s + LOSS_S) * MICROSECONDS
    for packet in packets:
        if packet.pts is not None and lost[0] <= packet.pts < lost[1]:
            continue
        for frame in processor.feed(packet):
            sample = sampler.feed(frame)
            if sample is None:
                continue
            if sample.fresh:
                # The engine starts a new window here, without earlier frames.
                sent.clear()
            sent.append(sample)
            for request in engine.push(sample):
                answers = engine.step([request])
                if answers and request.end >= lost[1]:
                    return _covered(sent, answers[0].tokens.kept, request.start, request.end)
    return 0.0


def _covered(sent: list[FrameSample], kept: int, start: int, end: int) -> float:
    """Share of ``[end - window, end)`` covered by the newest frames with the answer's ``kept`` tokens."""
    covered = 0
    for sample in reversed([sample for sample in sent if sample.pts < end]):
        if kept <= 0:
            break
        kept -= sample.tokens
        covered += max(0, min(sample.end, end) - max(sample.pts, start))
    return covered / (WINDOW_S * MICROSECONDS)
