"""``random``: a control: as many tokens as the anchors have, anywhere."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class Random(RefreshPolicy):
    """Uniform without replacement; a stream's window always draws the same tokens, wherever it runs."""

    seed: int = 0

    def select(self, context: RefreshContext) -> Selection:
        wanted = context.tokens(int(context.anchor.sum()))
        generator = np.random.default_rng([self.seed, context.window, zlib.crc32(context.stream.encode())])
        return Selection(context.mask(generator.permutation(len(context))[:wanted]))
