"""The calibrated engine, for load tests only: recorded statistics answer, and a cost model says how long it takes.

It keeps the same books as the native engine (frames, windows, static gate, refresh policies, counts of tokens) on the
same code, and replaces the model: ``shape`` is a model without weights, ``books`` counts what a window would ask of it,
``scores`` draws answers. Hundreds of real streams, actors and sockets then run on a few cores.
"""

from __future__ import annotations

from cluster.engine.calibrated.engine import DEMO_SCORES as DEMO_SCORES
from cluster.engine.calibrated.engine import CalibratedEngine as CalibratedEngine
from cluster.engine.calibrated.engine import ScoreStatistics as ScoreStatistics
from cluster.engine.calibrated.engine import StepCosts as StepCosts
from cluster.engine.calibrated.shape import shape_of as shape_of

__all__ = ["DEMO_SCORES", "CalibratedEngine", "ScoreStatistics", "StepCosts", "shape_of"]
