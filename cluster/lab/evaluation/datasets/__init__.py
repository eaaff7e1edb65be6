"""Labelled footage: one file per layout on disk, each with one entry in ``layouts``."""

from cluster.lab.evaluation.datasets.base import (
    Dataset,
    Layout,
    layouts,
    load_dataset,
)
from cluster.lab.evaluation.datasets.probe import UnreadableVideoError, VideoFacts, probe_video
from cluster.lab.evaluation.datasets.video import LabelledVideo, Skipped

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
