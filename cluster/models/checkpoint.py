"""What all families share because transformers does: decoder layers, embedding, head, answers, and their cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cluster.errors import ModelError
from cluster.models.base import FrameTokens, PatchBatch, VisionLanguageModel
from cluster.models.settings import ModelSettings
from cluster.types import PatchGeometry

SYSTEM_PROMPT = "You are a helpful assistant."
# Bounds the tower's activations whatever the number of frames. On a CPU they should also stay near the caches: 16
# complete 448x448 frames take 20 % longer in one pass than four by four.
PATCHES_PER_PASS = {"cpu": 4096, "cuda": 65536}
INSTRUCTION = " Answer with yes or no only."


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A transformers model with its tokenizer, not yet wrapped.

    ``mean`` and ``std`` (RGB) are the image processor's, ``None`` where the checkpoint has none: the family's own then.
    ``max_pixels`` bounds a frame for families of native resolution. ``settings``: how the checkpoint wants to be asked.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    random_weights: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    max_pixels: int = 448 * 448
    settings: ModelSettings = field(default_factory=ModelSettings)


class CheckpointModel(VisionLanguageModel):
    """A family over a transformers ``...ForConditionalGeneration``: everything but vision, prompt and positions."""

    # Special tokens its prompt is made of: a tokenizer that would spell them out letter by letter is refused.
    prompt_tokens: ClassVar[tuple[str, ...]]
    # A transformers model; its parts have types only at run time.
    model: Any

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = checkpoint.model
        self.tokenizer = checkpoint.tokenizer
        self.device = checkpoint.device
        self.dtype = checkpoint.dtype
        self.random_weights = checkpoint.random_weights
        self.settings = checkpoint.settings
        self.geometry = self._geometry(checkpoint)
        for token in self.prompt_tokens:
            self._require(token)
        self.yes_no_ids()

    # -- what a family adds -----------------------------------------------------------------------
    @abstractmethod
    def _geometry(self, checkpoint: Checkpoint) -> PatchGeometry:
        """Patch size, merge and temporal patch of the checkpoint.

        Raises:
            ModelError: a shape the pruned tower cannot serve.
        """

    @property
    def _text_model(self) -> Any:
        return self.model.model.language_model

    @property
    def _open_instruction(self) -> str:
        """What follows a free question: what the checkpoint was trained with, by default nothing."""
        return self.settings.open_instruction or ""

    @classmethod
    @abstractmethod
    def untrained(cls, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any]:
        """A transformers model with these entries of its text and vision configuration, and a small tokenizer."""

    @abstractmethod
    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """Run frames that each keep something through the tower: their visual tokens ``[t, D]``, in order of cells."""

    def _frame_tokens(self, frame: PatchBatch, visual: Tensor) -> FrameTokens:
        """Visual tokens ``[t, D]`` and whatever text the family writes around a frame."""
        return FrameTokens(embeds=visual, cells=frame.cells.to(self.device), grid=frame.grid)

    # -- vision -----------------------------------------------------------------------------------
    @torch.no_grad()
    def encode(self, frames: Sequence[PatchBatch]) -> list[FrameTokens]:
        kept = [frame for frame in frames if len(frame.cells)]
        visual = iter([tokens for part in self._parts(kept) for tokens in self._encode_kept(part)])
        nothing = torch.zeros(0, self.text_config.hidden_size, dtype=self.dtype, device=self.device)
        return [
            self._frame_tokens(frame, next(visual))
            if len(frame.cells)
            else FrameTokens(embeds=nothing, cells=frame.cells.to(self.device), grid=frame.grid)
            for frame in frames
        ]

    def _parts(self, frames: Sequence[PatchBatch]) -> list[list[PatchBatch]]:
        limit = PATCHES_PER_PASS.get(self.device.type, PATCHES_PER_PASS["cuda"])
        parts: list[list[PatchBatch]] = []
        room = 0
        for frame in frames:
            count = len(frame.patches)
            if count > room:
                parts.append([])
                room = limit
            parts[-1].append(frame)
            room -= count
        return parts

    # -- language model ---------------------------------------------------------------------------
    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self._text_model.layers)

    @property
    def text_config(self) -> Any:
        return self._text_model.config

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self._text_model.embed_tokens(ids.to(self.device))
        return embedded

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.model.lm_head(self._text_model.norm(hidden))
        return scores

    # -- prompt -----------------------------------------------------------------------------------
    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt_ids(self, before: str, text: str, after: str) -> list[int]:
        """Ids of a template around somebody's ``text``, in which special tokens are letters like any others.

        A text that spells none is tokenized together with the template, as the checkpoint was trained.
        """
        together, around = self._ids(before + text + after), [*self._ids(before), *self._ids(after)]
        if self._special_among(together) == self._special_among(around):
            return together
        return [*self._ids(before), *self.text_ids(text), *self._ids(after)]

    def text_ids(self, text: str) -> list[int]:
        plain = list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if not self._special_among(plain):
            return plain
        # Tokens such as <tool_call>, which a tokenizer cuts out although it does not call them special.
        return [token for letter in text for token in self._ids(letter)]

    def _special_among(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._special]

    @cached_property
    def _special(self) -> frozenset[int]:
        """Ids that mean something to the model which a text must not say: special tokens and others in brackets."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(
            number
            for number, token in added
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        )

    def _require(self, token: str) -> None:
        found = self.tokenizer.convert_tokens_to_ids(token)
        if found is None or found == self.tokenizer.unk_token_id or found >= self.text_config.vocab_size:
            raise ModelError(
                f"the tokenizer of {self.model.name_or_path or self.family} has no token {token!r} the model knows; "
                "put the tokenizer the checkpoint came with beside its weights"
            )

    def yes_no_ids(self) -> tuple[list[int], list[int]]:
        yes, no = self._first_ids(("yes", "Yes", "YES")), self._first_ids(("no", "No", "NO"))
        # A first token that both answers share tells nothing.
        shared = yes & no
        if not yes - shared or not no - shared:
            raise ModelError(f"the tokenizer of {self.family} cannot tell yes from no by the answer's first token")
        return sorted(yes - shared), sorted(no - shared)

    def _first_ids(self, words: Sequence[str]) -> set[int]:
        """Tokens that are one of the words; only if there are none, tokens that begin one ("Y" also begins "You")."""
        spelled = [self._ids(variant) for word in words for variant in (word, f" {word}")]
        return {ids[0] for ids in spelled if len(ids) == 1} or {self._ids(word)[0] for word in words}

    # -- the reference ----------------------------------------------------------------------------
    @contextmanager
    def _library_attention(self) -> Iterator[None]:
        """Run transformers' own SDPA everywhere, whatever attention function an engine has set."""
        configs = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        before = [(config, config._attn_implementation) for config in configs.values()]
        for config in configs.values():
            config._attn_implementation = "sdpa"
        try:
            yield
        finally:
            for config, name in before:
                config._attn_implementation = name

    # -- sizes ------------------------------------------------------------------------------------
    def llm_flops(self, computed: int, attended: int) -> int:
        """FLOPs of the decoder layers for ``computed`` tokens whose attention spans sum to ``attended``.

        Linear layers and the two attention products; norms, activations and rotary are left out, and so is the output
        head, which only the last token of each question passes.
        """
        weights = sum(linear_weights(layer) for layer in self.layers)
        config = self.text_config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_pair = 4 * config.num_attention_heads * head * config.num_hidden_layers
        return int(2 * computed * weights + per_pair * attended)


def patch_counts(frames: Sequence[PatchBatch | int]) -> list[int]:
    """Kept patches of each frame."""
    return [f if isinstance(f, int) else int(f.patches.shape[0]) for f in frames]


def linear_weights(module: nn.Module) -> int:
    """Weights of all linear layers in ``module``: twice this is the FLOPs of one row through each of them."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
