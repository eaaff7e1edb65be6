"""Not a test: prints how many tokens each policy keeps of the videos that are named.

python tests/support/kept_shares.py [VIDEO ...]
"""

import sys
import time
from pathlib import Path

from cluster.codec import FileSource
from cluster.codec.processor import CodecProcessor
from cluster.registry import pruners
from cluster.types import PatchGeometry
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

QWEN = PatchGeometry(patch=14, merge=2, temporal=2)


def main(videos: list[Path]) -> None:
    """Kept share with and without the complete frames, and milliseconds per sample for mask and patches."""
    print(f"{'video':32} {'policy':12} {'kept':>7} {'complete':>9} {'others kept':>12} {'ms/sample':>10}")
    for video in videos:
        source, processor = FileSource(video), CodecProcessor(QWEN)
        processor.open(source.open())
        frames = [frame for packet in source.packets() for frame in processor.feed(packet)] + processor.drain()
        for name in pruners:
            sampler = PatchSampler(video.stem, make_pruner(name), fps=2.0)
            start = time.perf_counter()
            sent = [sample for frame in frames if (sample := sampler.feed(frame)) is not None]
            spent = time.perf_counter() - start
            others = [sample for sample in sent if not sample.anchor]
            kept = sum(sample.tokens for sample in sent) / sum(sample.grid.tokens for sample in sent)
            pruned = sum(sample.tokens for sample in others) / max(1, sum(sample.grid.tokens for sample in others))
            print(
                f"{video.stem:32} {name:12} {kept:7.1%} {1 - len(others) / len(sent):9.1%} {pruned:12.1%} "
                f"{1000 * spent / len(frames):10.2f}"
            )


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
