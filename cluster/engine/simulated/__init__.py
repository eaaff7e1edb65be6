"""The simulated engine, for load tests only: recorded statistics answer, and a cost model says how long it takes.

Hundreds of real streams, actors and sockets then run on a few cores.
"""

from __future__ import annotations

from cluster.engine.simulated.engine import DEMO_SCORES as DEMO_SCORES
from cluster.engine.simulated.engine import ScoreStatistics as ScoreStatistics
from cluster.engine.simulated.engine import SimulatedEngine as SimulatedEngine
from cluster.engine.simulated.engine import StepCosts as StepCosts
