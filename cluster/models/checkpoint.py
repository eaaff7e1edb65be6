"""Loaded transformers checkpoints, and helpers shared by the families."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from cluster.models.settings import ModelSettings
from cluster.models.upload import to_device

SYSTEM_PROMPT = "You are a helpful assistant."
# Maximum patches per tower call: bounds activations. On a CPU they should also fit the caches: 16 complete 448x448
# frames take 20 % longer in one call than in four.
PATCHES_PER_PASS = {"cpu": 4096, "cuda": 65536}
INSTRUCTION = " Answer with yes or no only."

# Eight-byte words summed at a time.
_DIGEST_WORDS = 1 << 18

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A transformers model and its tokenizer, before a family wraps them.

    ``mean``, ``std`` (RGB): from the image processor; empty: the family's defaults. ``max_pixels``: maximum frame size
    for families of native resolution.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    random_weights: bool
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    max_pixels: int = 448 * 448
    settings: ModelSettings = field(default_factory=ModelSettings)


def head_size(config: Any) -> int:
    """Attention head size of a language model with this configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def linear_weights(module: nn.Module) -> int:
    """Number of weights in the linear layers of ``module``: half their FLOPs per row."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def weights_digest(module: nn.Module) -> str:
    """Digest of every parameter's name, shape and value (except on the meta device). Values are reduced on the device:
    each word is multiplied by an odd pseudo-random factor of its index, and summed, so that every change of one word
    changes the sum, and almost every other change does."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (_DIGEST_WORDS,), generator=generator) * 2 + 1
    hasher = hashlib.blake2b(digest_size=16)
    sums: list[Tensor] = []
    for name, parameter in sorted(module.named_parameters()):
        hasher.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        if parameter.is_meta:
            continue
        factors = factors.to(parameter.device)
        for part in torch.split(parameter.detach().reshape(-1).view(torch.uint8), 8 * _DIGEST_WORDS):
            # Copied and padded, so that words are whole and aligned.
            words = torch.cat((part, part.new_zeros(-len(part) % 8))).view(torch.int64)
            sums.append((words * factors[: len(words)]).sum())
    hasher.update(torch.stack(sums).cpu().numpy().tobytes())
    return hasher.hexdigest()


def fuse_norms(model: nn.Module) -> None:
    """Compute each RMS norm of a transformers model in one operation instead of six. In float32, results are equal bit
    by bit."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = partial(rms_norm, module)


def rms_norm(module: Any, x: Tensor) -> Tensor:
    """Apply a transformers RMS norm to ``x [..., n]``."""
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def normalise(patches: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """``patches [n, T, C, p, p]`` uint8 -> ``(x / 255 - mean) / std`` of the same shape in ``dtype``."""
    shape = (1, 1, -1, 1, 1)
    scale = to_device(torch.tensor([1.0 / (255.0 * s) for s in std]), patches.device).view(shape)
    shift = to_device(torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]), patches.device).view(shape)
    return torch.addcmul(shift, patches.to(torch.float32), scale).to(dtype)


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
    """Build a deterministic ``PreTrainedTokenizerFast`` of at most ``VOCABULARY`` ids, ``special`` first. ``texts``:
    additional training text; frequent words become single tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(tuple(special), tuple(texts))),
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=[token for token in special if token not in (eos, pad)],
    )


def untrained(family: Any, text: dict[str, Any], vision: dict[str, Any], *, tied: bool = True) -> tuple[Any, Any]:
    """An untrained transformers model of a family with this text and vision configuration, and a small tokenizer;
    ``tied``: input and output embeddings are the same weights."""
    tokens, pad, eos = family.special_tokens, family.special_tokens[0], family.end_token
    tokenizer = preset_tokenizer(tokens, eos=eos, pad=pad)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    of_text = {"pad_token_id": ids[pad], "bos_token_id": ids[pad], "eos_token_id": ids[eos]}
    make_config, make_model = family.library
    config = make_config(
        text_config={"vocab_size": VOCABULARY, **of_text, **text},
        vision_config=({family.tower_width: text["hidden_size"]} if family.tower_width else {}) | vision,
        tie_word_embeddings=tied,
        **{name: ids[token] for name, token in family.placeholders.items()},
    )
    return make_model(config), tokenizer
