"""Labelled footage: one file per layout on disk, each with one entry in ``layouts``."""

from cluster.evaluation.datasets import ucf_crime
from cluster.evaluation.datasets.base import (
    Dataset,
    LabelledEvent,
    LabelledVideo,
    Layout,
    Skipped,
    layouts,
    load_dataset,
)
from cluster.evaluation.datasets.probe import UnreadableVideoError, VideoFacts, probe_video

__all__ = [
    "Dataset",
    "LabelledEvent",
    "LabelledVideo",
    "Layout",
    "Skipped",
    "UnreadableVideoError",
    "VideoFacts",
    "layouts",
    "load_dataset",
    "probe_video",
    "ucf_crime",
]
