"""Prompts whose first items are loaded, and so travel without their content."""

from __future__ import annotations

from typing import Any

from cluster.engine.vllm.items import MODALITY

CONTENT = "embeds"
"""What an item loses; its positions stay, which vLLM needs of all tokens."""


def without_content(prompt: Any, count: int) -> Any:
    """``prompt`` (see :func:`~cluster.engine.vllm.items.window_prompt`) with its first ``count`` items bare.

    Nobody looks at embeddings of tokens that are loaded, and a window's are megabytes for each of its questions. Such a
    prompt can only be computed where its first items are loaded: a request whose load fails must end.
    """
    for item in prompt["mm_kwargs"][MODALITY][:count]:
        item.pop(CONTENT)
    return prompt
