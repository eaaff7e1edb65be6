"""What a computed window of each class of cameras asks of a replica, at each rung, after so many gated or lost ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cluster.control.costs import CostModel, WindowWork
from cluster.control.demand import Demand, work
from cluster.control.ladder import Ladder, Rung


def work_after(demand: Demand, rung: Rung, strides: int) -> WindowWork:
    """Of a window with ``strides`` strides of new frames; in all but the last nothing moved: only anchors are new.

    A window with more new frames is like one of a longer stride, so that production's own estimate says what it costs.
    """
    one = work(demand, rung)
    if rung.shed or strides <= 1 or one.encoded == 0:
        return one
    quiet = work(replace(demand, kept=0.0), rung).encoded / one.encoded
    stretched = demand.stride_s * (1 + (strides - 1) * min(1.0, quiet))
    return work(replace(demand, stride_s=min(stretched, demand.window_s / rung.stride)), rung)


class WorkTable:
    """``seconds[kind, rung, held, strides]`` that a window adds to a step: one ``held`` strides long, as windows grow
    after a fresh start, with ``strides`` of new frames.

    ``alike``: windows cost the same whatever was gated or lost before them: ``cost`` was measured over such windows.
    """

    def __init__(self, demands: Sequence[Demand], ladder: Ladder, costs: CostModel, *, alike: bool = False) -> None:
        longest = max(math.ceil(demand.window_s / demand.stride_s) for demand in demands)
        shape = (len(demands), len(ladder.rungs), longest + 1, 2 if alike else longest + 1)
        self.seconds: npt.NDArray[np.float64] = np.zeros(shape)
        for kind, rung, held, strides in np.ndindex(shape):
            if held and strides and not ladder.rungs[rung].shed:
                demand = demands[kind]
                length_s = min(demand.window_s, held * demand.stride_s * ladder.rungs[rung].stride)
                asked = work_after(replace(demand, window_s=length_s), ladder.rungs[rung], min(strides, held))
                self.seconds[kind, rung, held, strides] = demand.cost * costs.window_seconds(asked)

    def of(
        self,
        kind: npt.NDArray[np.int64],
        rung: npt.NDArray[np.int64],
        held: npt.NDArray[np.float64],
        strides: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """Predicted seconds of each window, without its part of the step."""
        held_at, strides_at = (
            np.clip(each, 1, most - 1).astype(np.int64)
            for each, most in zip((held, strides), self.seconds.shape[2:], strict=True)
        )
        found: npt.NDArray[np.float64] = self.seconds[kind, rung, held_at, strides_at]
        return found
