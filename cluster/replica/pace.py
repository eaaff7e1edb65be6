"""How long a window will make a step: what the cost model says of the last ones, corrected by measured steps."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.control.costs.model import CostModel, WindowWork
from cluster.types import Answer


class StepPace:
    """Predicts the seconds of windows; everything on the engine's thread.

    Without a cost model a window is taken to cost in proportion to the tokens it computes, and what a token costs is
    learnt from the steps.
    """

    def __init__(self, costs: CostModel | None = None) -> None:
        self._costs = costs
        # Measured seconds over predicted ones.
        self._ratio = 0.0 if costs is None else 1.0
        self._cameras: dict[str, float] = {}
        self._mean = 0.0

    def expect(self, stream: str) -> float:
        """Seconds by which a camera's next window will make a step longer; of one not known, what others' mean is."""
        return self._ratio * self._cameras.get(stream, self._mean)

    def stepped(self, answers: Sequence[Answer], seconds: float) -> None:
        """A step of these answers took so long."""
        predicted = 0.0
        for stream, answer in {answer.stream: answer for answer in answers}.items():
            asked = 0.0 if answer.gated else self._asked(WindowWork.counted(answer.tokens))
            predicted += asked
            self._mean += 0.1 * (asked - self._mean)
            self._cameras[stream] = (self._cameras.get(stream, asked) + asked) / 2
        if predicted > 0:
            fixed = 0.0 if self._costs is None else self._costs.step_s
            found = seconds / (predicted + fixed)
            self._ratio = found if self._ratio == 0 else self._ratio + 0.2 * (found - self._ratio)

    def forget(self, stream: str) -> None:
        """A camera is gone."""
        self._cameras.pop(stream, None)

    def _asked(self, work: WindowWork) -> float:
        return work.computed if self._costs is None else self._costs.window_seconds(work)
