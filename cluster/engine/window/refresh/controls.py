"""Baselines of refresh policies: ``all``, ``none``, ``first_n``, ``random``, ``shifted``."""

import zlib
from dataclasses import dataclass

import numpy as np

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class All(RefreshPolicy):
    """Recompute every overlap token: upper bound of cost and exactness."""

    budgeted = False

    def select(self, context: RefreshContext) -> Selection:
        return Selection(np.ones(len(context), dtype=bool))


@dataclass(frozen=True, slots=True)
class Nothing(RefreshPolicy):
    """Reuse everything: the lower bound of cost."""

    budgeted = False

    def select(self, context: RefreshContext) -> Selection:
        return Selection(np.zeros(len(context), dtype=bool))


@dataclass(frozen=True, slots=True)
class FirstN(RefreshPolicy):
    """Recompute the oldest ``frames`` frames that have tokens, as the code published with CodecSight does; with a
    budget, the oldest tokens."""

    frames: int = 3

    def select(self, context: RefreshContext) -> Selection:
        leading = np.unique(context.frame)[: self.frames]
        wanted = context.tokens(int(np.isin(context.frame, leading).sum()))
        return Selection(context.mask(np.arange(wanted)))


@dataclass(frozen=True, slots=True)
class Random(RefreshPolicy):
    """As many tokens as the anchors have, uniform without replacement.

    A stream's window always draws the same tokens, wherever it runs.
    """

    seed: int = 0

    def select(self, context: RefreshContext) -> Selection:
        wanted = context.tokens(int(context.anchor.sum()))
        generator = np.random.default_rng([self.seed, context.window, zlib.crc32(context.stream.encode())])
        return Selection(context.mask(generator.permutation(len(context))[:wanted]))


@dataclass(frozen=True, slots=True)
class Shifted(RefreshPolicy):
    """Recompute the frames farthest from any anchor, as many tokens as the anchors have.

    Frames between anchors are pruned and smaller: more of them are taken, from the middle outwards.
    """

    def select(self, context: RefreshContext) -> Selection:
        wanted = context.tokens(int(context.anchor.sum()))
        anchors = np.unique(context.frame[context.anchor])
        if not len(anchors):
            return Selection(context.mask(np.arange(wanted)))
        # The stretch before the first and after the last anchor ends nowhere: distance to the one anchor it has.
        distance = np.abs(context.frame[:, None] - anchors).min(axis=1)
        order = np.lexsort((context.offset, context.frame, -distance))
        return Selection(context.mask(order[:wanted]))
