"""Organisers, one per file: how remembered tokens are grouped, so that a question fetches groups and not tokens."""

from cluster.memory.organise import frames, resv
from cluster.memory.organise.base import ClusterTable, Organiser, organisers

__all__ = ["ClusterTable", "Organiser", "frames", "organisers", "resv"]
