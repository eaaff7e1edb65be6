"""Simulated engine for load tests: recorded score statistics and a cost model instead of a GPU.

Hundreds of real streams, actors and sockets then run on a few cores.
"""

from cluster.engine.simulated.engine import DEMO_SCORES as DEMO_SCORES
from cluster.engine.simulated.engine import ScoreStatistics as ScoreStatistics
from cluster.engine.simulated.engine import SimulatedEngine as SimulatedEngine
from cluster.engine.simulated.engine import StepCosts as StepCosts
from cluster.engine.simulated.engine import ZeroStepCosts as ZeroStepCosts
