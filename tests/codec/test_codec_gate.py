"""From an encoder's keyframe to the static gate: what appears in the keyframe itself, and a scene that is still."""

from pathlib import Path

import numpy as np
import pytest
from codec_clips import encode, read, texture

from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.engine.simulated import SimulatedEngine
from cluster.models.loading import load_shape
from cluster.registry import pruners
from cluster.types import MICROSECONDS, Answer, Question, StreamSpec
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

FPS, GOP, SECONDS, APPEARS_S = 8, 32, 24, 16
WIDTH, HEIGHT = 224, 224


def still(appears: bool) -> list[np.ndarray]:
    """A still scene with a sensor's noise; something stands in it from the keyframe at 16 s on."""
    random = np.random.default_rng(5)
    scene, pictures = texture(WIDTH, HEIGHT), []
    for index in range(FPS * SECONDS):
        picture = scene.astype(np.int16) + random.integers(-1, 2, scene.shape)
        if appears and index >= APPEARS_S * FPS:
            picture[60:140, 80:130] = 230
        pictures.append(picture.clip(0, 255).astype(np.uint8))
    return pictures


def answered(path: Path, pruner: str) -> list[Answer]:
    """Answers of a camera with a keyframe and an anchor every four seconds, and windows of as long a stride."""
    header, packets = read(path)
    shape = load_shape("demo")
    engine = SimulatedEngine(shape)
    engine.admit(StreamSpec("cam", (Question("q", "Is anyone on the ground?"),), 16.0, 4.0))
    processor = CodecProcessor(shape.geometry, CodecOptions(fps=2.0, anchor_interval_s=4.0))
    processor.open(header)
    sampler = PatchSampler("cam", make_pruner(pruner), 2.0)
    answers, anchors = [], 0
    for packet in packets:
        for frame in processor.feed(packet):
            anchors += frame.anchor
            sample = sampler.feed(frame)
            for request in engine.push(sample) if sample is not None else ():
                answers += engine.step([request])
    assert anchors == SECONDS // 4
    return answers


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_what_appears_in_a_keyframe_is_looked_at_and_a_still_scene_is_not(tmp_path: Path, codec: str) -> None:
    for appears in (False, True):
        clip = encode(tmp_path / f"{codec}-{appears}.mp4", still(appears), codec, gop=GOP, fps=FPS)
        for pruner in pruners.names():
            answers = answered(clip, pruner)
            computed = [answer.end // MICROSECONDS for answer in answers if not answer.gated]
            assert computed == [4, 8, 20] if appears else [4, 8], (pruner, appears)
