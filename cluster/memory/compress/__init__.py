"""Compressors, one per file: which tokens a memory keeps when its budget is reached."""

from cluster.memory.compress.base import Compressor

__all__ = ["Compressor"]
