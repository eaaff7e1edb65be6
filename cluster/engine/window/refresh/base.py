"""Which tokens of the overlap to compute again: one interface, matched budgets.

When a window slides, the frames it shares with the last one have KV from then. Their keys stand where they stood (see
:mod:`~cluster.engine.window.kv`), but what they *hold* was computed under a context that
has partly left the window. A policy names the tokens to recompute from their cached visual embeddings.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from cluster.engine.window.planner import BoolArray, IntArray
from cluster.engine.window.stream import Stream, StreamFrame, token_counts
from cluster.models.base import VisionLanguageModel
from cluster.registry import refresh_policies


@dataclass(frozen=True, slots=True, eq=False)
class RefreshContext:
    """Features of the ``n`` overlap tokens, in time order; arrays are ``[n]`` unless stated.

    * ``frame``: the token's frame, counted from the window's first; ``offset``: its place among that frame's tokens
    * ``frame_tokens``: how many tokens that frame has; ``anchor``: whether it is one
    * ``context``: visual tokens before it when its KV was computed; ``lost``: how many of them have left the window
    * ``system``: tokens of the system prompt, which never leave; ``layers``: of the language model; ``profile``: its
      shares per layer (see :class:`~cluster.models.settings.ModelSettings`)
    * ``budget``: tokens to compute, ``None`` for the policy's natural amount
    """

    stream: str
    window: int
    system: int
    layers: int
    budget: int | None
    frame: IntArray
    offset: IntArray
    frame_tokens: IntArray
    anchor: BoolArray
    context: IntArray
    lost: IntArray
    profile: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.frame)

    def tokens(self, natural: int) -> int:
        """The budget if one is given, else ``natural``, never more than there are tokens."""
        return min(natural if self.budget is None else self.budget, len(self))

    def mask(self, indices: IntArray) -> BoolArray:
        """``[n]`` bool, true at ``indices``."""
        mask = np.zeros(len(self), dtype=bool)
        mask[indices] = True
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class KVChange:
    """KV of the ``m`` overlap tokens still computed, after and before ``layer``: ``[m, Hkv, d]``, keys raw."""

    layer: int
    k_new: Tensor
    v_new: Tensor
    k_old: Tensor
    v_old: Tensor


class Narrowing(Protocol):
    """Drops overlap tokens from the computation between layers; in higher layers they keep their old KV."""

    def after(self, layer: int) -> bool:
        """Whether to call :meth:`select_kept` after ``layer``."""

    def select_kept(self, change: KVChange) -> Tensor:
        """Tokens that continue, ``[m]`` bool, on any device."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """``mask [n]``: overlap tokens to compute from the first layer on; ``narrowing`` thins them out later."""

    mask: BoolArray
    narrowing: Narrowing | None = None


class RefreshPolicy(ABC):
    """Selects overlap tokens to recompute; with a budget exactly that many (or all there are)."""

    # False: the policy is its own amount (``all``, ``none``) and a budget changes nothing.
    budgeted: ClassVar[bool] = True

    @abstractmethod
    def select(self, context: RefreshContext) -> Selection:
        """Select tokens of one window."""


def choose_refreshed(
    stream: Stream, window: int, frames: Sequence[StreamFrame], system: int, model: VisionLanguageModel
) -> Selection:
    """What the stream's policy selects of the overlap of a window of these ``frames``; ``system``: tokens before it."""
    policy: RefreshPolicy = refresh_policies.get(stream.spec.refresh)()
    profile = model.settings.layer_profile
    context = refresh_context(stream, window, frames, system, len(model.layers), profile)
    # Until the first frame leaves the window, every token was computed under the context it has now: causal attention
    # makes that KV the one a full computation gives, and there is nothing to refresh.
    exact = policy.budgeted and frames[0].first == stream.first_token and frames[0].has_kv
    if exact or not len(context):
        return Selection(np.zeros(len(context), dtype=bool))
    return policy.select(context)


def refresh_context(
    stream: Stream,
    window: int,
    frames: Sequence[StreamFrame],
    system: int,
    layers: int,
    profile: tuple[float, ...] = (),
) -> RefreshContext:
    """Build the context of those ``frames`` that have KV."""
    known = [frame for frame in frames if frame.computed is not None]
    counts = np.array(token_counts(known), np.int64)
    count = int(counts.sum())
    frame = np.arange(len(known)).repeat(counts)
    offset = np.arange(count) - (counts.cumsum() - counts)[frame]
    number = offset + np.array([each.first for each in known], np.int64)[frame]
    computed = np.concatenate([np.zeros((2, 0), np.int64), *(f.computed for f in known if f.computed is not None)], 1)
    share = stream.spec.refresh_budget
    return RefreshContext(
        stream=stream.spec.stream,
        window=window,
        system=system,
        layers=layers,
        budget=None if share is None else min(count, round(share * count)),
        frame=frame,
        offset=offset,
        frame_tokens=counts[frame],
        anchor=np.array([each.anchor for each in known], np.bool_)[frame],
        context=number - computed[1],
        lost=frames[0].first - computed[1],
        profile=profile,
    )
