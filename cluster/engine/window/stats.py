"""What the engine's last step did, window by window: for benches and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.types import Timing, TokenCount


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Work of one computed window. FLOPs as the model counts them (multiply-add = 2).

    ``computed``: rows through the language model, and ``attended``: pairs of a row and a slot it saw, both averaged
    over layers (a policy that narrows computes fewer in deeper ones). ``decoded``: tokens of explanations run after
    that, not in ``llm_flops``.
    """

    stream: str
    window: int
    tokens: TokenCount
    timing: Timing
    computed: float
    attended: float
    tower_flops: int
    llm_flops: int
    decoded: int


@dataclass(frozen=True, slots=True)
class StepStats:
    """One call of ``step``: the windows computed, and how many were gated or came too late to be answered."""

    windows: tuple[WindowStats, ...] = ()
    gated: int = 0
    expired: int = 0

    @property
    def tower_flops(self) -> int:
        return sum(window.tower_flops for window in self.windows)

    @property
    def llm_flops(self) -> int:
        return sum(window.llm_flops for window in self.windows)
