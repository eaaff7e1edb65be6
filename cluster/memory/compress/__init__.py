"""Compressors, one per file: which tokens a memory keeps when its budget is reached."""

from cluster.memory.compress import cords, infinipot, infinipot_v, livevlm, simple, snapkv, streammem
from cluster.memory.compress.base import Compressor, compressors

__all__ = [
    "Compressor",
    "compressors",
    "cords",
    "infinipot",
    "infinipot_v",
    "livevlm",
    "simple",
    "snapkv",
    "streammem",
]
