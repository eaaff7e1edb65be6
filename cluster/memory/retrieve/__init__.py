"""Retrievers, one per file: which clusters a question needs."""

from cluster.memory.retrieve.base import Retrieved, Retriever

__all__ = ["Retrieved", "Retriever"]
