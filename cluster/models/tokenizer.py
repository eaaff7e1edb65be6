"""A small byte-level tokenizer, trained in memory, for presets: real prompts need no download.

Any text round-trips (256 bytes are in the vocabulary); the words of the prompts are whole tokens, so that a question
costs about as many tokens as with a real checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024
_ANSWERS = "yes Yes no No YES NO true false"
_CORPUS = """
system user assistant You are a helpful assistant. Answer with yes or no only. The video shows frames of one camera.
Is anyone climbing the fence? Is there a person in the picture? Is a car parked in front of the gate? Does anybody run?
Is there a fire or smoke? Is someone lying on the ground? Are people fighting? Did a vehicle stop on the road? Was a bag
left behind? Is the door open? Has anyone entered the building at night? Does a truck block the street? Can you see a
dog or another animal? Is the light on? Is more than one person visible? Are two cars moving in the same direction?
Describe what happens in this video. Why? Because of that there is nothing to see, it moves from left to right, near the
wall. Does anything move? Is anyone walking on the pavement or crossing the street? What changed since the last frame?
"""


@lru_cache(maxsize=4)
def _trained(special: tuple[str, ...], texts: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    answers = [word for word in _ANSWERS.split() for _ in range(50)]
    tokenizer.train_from_iterator([*answers, " ".join(answers), _CORPUS, _CORPUS, *texts], trainer)
    return str(tokenizer.to_str())


def preset_tokenizer(special: Sequence[str], *, eos: str, pad: str, texts: Sequence[str] = ()) -> Any:
    """A ``PreTrainedTokenizerFast`` whose first ids are ``special``; at most ``VOCABULARY`` ids, always the same.

    ``texts``: more to train it on; a word that is often in them becomes a token of its own.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(tuple(special), tuple(texts))),
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=[token for token in special if token not in (eos, pad)],
    )
