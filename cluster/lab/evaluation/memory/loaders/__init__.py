"""Published sets of questions about long videos: one file per layout, each with one entry in ``past_layouts``."""

from cluster.lab.evaluation.memory.loaders.base import DatasetVideo, PastDataset, load_past_dataset, past_layouts

__all__ = ["DatasetVideo", "PastDataset", "load_past_dataset", "past_layouts"]
