"""The demo model's tokenizer: whole words for what it is asked, one token for each fixed phrase of the prompt."""

from __future__ import annotations

from typing import Any

from cluster.lab.scenes.actors import COLORS
from cluster.lab.scenes.questions import NUMBERS, phrasings
from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.models.checkpoint import INSTRUCTION, SYSTEM_PROMPT
from cluster.models.qwen2_5_vl import SPECIAL_TOKENS
from cluster.models.tokenizer import preset_tokenizer

# The prompt's fixed parts: as one token each, a question costs its own words and two more.
PHRASES = (
    f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n",
    f"{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n",
)
_MEMORY = (
    "How many people were seen? How many people crossed the picture?",
    "How many vehicles passed? How many vehicles were seen?",
    "Which came first, a person or a vehicle? What was seen first, a vehicle or a person?",
    *(
        f"Did a {color} vehicle pass earlier? Was there a {color} vehicle? Did a {color} vehicle stop here earlier?"
        for color in COLORS
    ),
    *(f"{word} {word}" for word in (*NUMBERS, "person", "vehicle", *COLORS)),
)
# How often a text is shown: a word must be frequent to be merged whole before the vocabulary is full.
_WEIGHT = 20


def demo_tokenizer() -> Any:
    """The tokenizer, trained in memory in a moment; always the same."""
    standing = [text for kind in EVENT_KINDS for text in phrasings(kind)]
    return preset_tokenizer(
        (*SPECIAL_TOKENS, *PHRASES),
        eos="<|im_end|>",
        pad="<|endoftext|>",
        texts=[*standing, *_MEMORY] * _WEIGHT,
    )
