"""Organisers, one per file: how remembered tokens are grouped, so that a question fetches groups and not tokens."""

from cluster.memory.organise.base import ClusterTable, NewTokens, Organiser

__all__ = ["ClusterTable", "NewTokens", "Organiser"]
