"""Labelled footage: one file per layout on disk, each with one entry in ``layouts``."""

from cluster.lab.evaluation.datasets.base import (
    Dataset,
    LabelledVideo,
    Layout,
    Skipped,
    UnreadableVideoError,
    VideoFacts,
    layouts,
    load_dataset,
    probe_video,
)

__all__ = [
    "Dataset",
    "LabelledVideo",
    "Layout",
    "Skipped",
    "UnreadableVideoError",
    "VideoFacts",
    "layouts",
    "load_dataset",
    "probe_video",
]
