"""Interface of refresh policies, which select the overlap tokens to recompute, at comparable budgets.

When a window slides, the frames it shares with the last one already have KV. Their keys keep their positions (see
:mod:`~cluster.engine.window.kv`), but their *content* was computed under a context that has partly left the window. A
policy selects the tokens to recompute from their cached visual embeddings.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from cluster.engine.window.planner import BoolArray, IntArray
from cluster.engine.window.stream import INVALID, Stream, StreamFrame, token_counts
from cluster.models.base import VisionLanguageModel
from cluster.registry import refresh_policies


@dataclass(frozen=True, slots=True, eq=False)
class RefreshContext:
    """Features of the ``n`` overlap tokens, in time order; arrays are ``[n]`` unless stated.

    * ``frame``: index of the token's frame in the window; ``offset``: the token's index in that frame
    * ``frame_tokens``: token count of that frame; ``anchor``: whether that frame is an anchor
    * ``context``: visual tokens before it when its KV was computed; ``lost``: how many of them have left the window
    * ``exact``: whether none has left, or been computed again: computing the token now would give the KV it has
    * ``system``: tokens of the system prompt, which never leave; ``layers``: layers of the language model;
      ``profile``: its refresh profile per layer (see :class:`~cluster.models.settings.ModelSettings`)
    * ``budget``: tokens to recompute; ``None``: the policy's natural amount
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
    exact: BoolArray
    profile: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.frame)

    def tokens(self, natural: int) -> int:
        """Tokens to recompute: the budget if set, else ``natural``; at most all of them."""
        return min(natural if self.budget is None else self.budget, len(self))

    def mask(self, indices: IntArray) -> BoolArray:
        """Mask ``[n]``, true at ``indices``."""
        mask = np.zeros(len(self), dtype=bool)
        mask[indices] = True
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class KVChange:
    """New and cached KV of the ``m`` overlap tokens still computed, at one layer, ``[m, Hkv, d]``, keys rotated."""

    k_new: Tensor
    v_new: Tensor
    k_old: Tensor
    v_old: Tensor


class Narrowing(Protocol):
    """Drops overlap tokens from the computation between layers; they keep their cached KV from that layer on."""

    compares: ClassVar[bool]
    """Whether it looks at the KV of the layer in question, for which all tokens are projected to keys and values."""

    def before(self, layer: int) -> bool:
        """Whether to call :meth:`select_kept` before ``layer``, which is above the first."""

    def select_kept(self, layer: int, change: KVChange | None) -> Tensor:
        """Mask ``[m]`` of the tokens that continue, on any device; ``change`` at ``layer``, if it ``compares``."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """``mask [n]``: overlap tokens to compute from the first layer on; ``narrowing`` drops some between layers."""

    mask: BoolArray
    narrowing: Narrowing | None = None


class RefreshPolicy(ABC):
    """Selects overlap tokens to recompute; with a budget, exactly that many (or all, if fewer)."""

    # False: the policy defines its own amount (``all``, ``none``) and ignores a budget.
    budgeted: ClassVar[bool] = True

    @abstractmethod
    def select(self, context: RefreshContext) -> Selection:
        """Select the tokens of one window."""


def choose_refreshed(
    stream: Stream, window: int, frames: Sequence[StreamFrame], system: int, model: VisionLanguageModel
) -> Selection:
    """Apply the stream's policy to the overlap of a window of ``frames``; ``system``: tokens of the system prompt."""
    policy: RefreshPolicy = refresh_policies.get(stream.spec.refresh)()
    profile = model.settings.layer_profile
    context = refresh_context(stream, window, frames, system, len(model.layers), profile)
    if not policy.budgeted:
        return policy.select(context)
    # Until the first frame leaves the window, nothing of any layer needs to be computed again.
    if context.exact.all():
        return Selection(np.zeros(len(context), dtype=bool))
    selection = policy.select(context)
    if selection.narrowing is None:
        # From the first selected token on whose KV may change, others see that change.
        changing = np.logical_or.accumulate(selection.mask & ~context.exact)
        selection = replace(selection, mask=selection.mask & changing)
    return selection


def refresh_context(
    stream: Stream,
    window: int,
    frames: Sequence[StreamFrame],
    system: int,
    layers: int,
    profile: tuple[float, ...] = (),
) -> RefreshContext:
    """Build the context of the overlap: those ``frames`` that have KV."""
    known = [frame for frame in frames if frame.computed is not None]
    counts = np.array(token_counts(known), np.int64)
    count = int(counts.sum())
    frame = np.arange(len(known)).repeat(counts)
    offset = np.arange(count) - (counts.cumsum() - counts)[frame]
    number = offset + np.array([each.first for each in known], np.int64)[frame]
    computed = np.concatenate([np.zeros((2, 0), np.int64), *(f.computed for f in known if f.computed is not None)], 1)
    share, lost = stream.spec.refresh_budget, frames[0].first - computed[1]
    # Invalid KV is computed again with this window.
    since = np.where(computed[0] == INVALID, window + 1, computed[0])
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
        lost=lost,
        exact=(lost == 0) & (since == np.maximum.accumulate(since)),
        profile=profile,
    )
