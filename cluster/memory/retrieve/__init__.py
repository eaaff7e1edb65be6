"""Retrievers, one per file: which clusters a question needs."""

from cluster.memory.retrieve import top_k, two_stage, wicsum
from cluster.memory.retrieve.base import Retrieved, Retriever, retrievers

__all__ = ["Retrieved", "Retriever", "retrievers", "top_k", "two_stage", "wicsum"]
