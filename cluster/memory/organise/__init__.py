"""Organisers, one per file: how remembered tokens are grouped, so that a question fetches groups and not tokens."""

from cluster.memory.organise import frames, mosaic, resv, tokens
from cluster.memory.organise.base import ClusterTable, NewTokens, Organiser, organisers

__all__ = ["ClusterTable", "NewTokens", "Organiser", "frames", "mosaic", "organisers", "resv", "tokens"]
