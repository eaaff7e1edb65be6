"""Street clips, one of a kind, and a clip's samples."""

from cluster.codec import FileSource
from cluster.codec.processor import CodecProcessor
from cluster.lab.scenes.street_clips import CLIP_KINDS, make_clip
from cluster.types import PatchGeometry


def make_all_clips(folder, kinds=tuple(CLIP_KINDS), **settings):
    """``folder/<kind>.mp4`` of every kind, each with a seed of its own: kind -> path."""
    paths = {kind: folder / f"{kind}.mp4" for kind in kinds}
    for seed, (kind, path) in enumerate(paths.items()):
        make_clip(kind, path, seed=seed, **settings)
    return paths


def sample_file(path):
    """A clip's samples at 2 per second, on Qwen's geometry of 448 x 448 pixels."""
    source, processor = FileSource(path), CodecProcessor(PatchGeometry(patch=14, merge=2, temporal=2))
    processor.open(source.open())
    frames = [frame for packet in source.packets() for frame in processor.feed(packet)]
    return frames + processor.drain()
