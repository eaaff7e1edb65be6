"""The simulated engine of a replica: step times of a cost model, recorded answers, no memory. For load tests only."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.config import SightlineConfig
from cluster.control.costs import CostModel, WindowWork, load, names
from cluster.errors import ConfigError
from cluster.types import TokenCount

if TYPE_CHECKING:
    from cluster.engine.base import Engine
    from cluster.memory.bank import MemoryBank
    from cluster.memory.tiers.stack import TierStack

SIMULATED = "simulated"
"""Model fingerprint of its tiers, in which nothing is stored."""

WARNING = "engine: simulated runs no model: its answers are drawn at random, and are for load tests only"


class ModelledSteps:
    """Adapts a cost model to the engine (:class:`cluster.engine.simulated.StepCosts`)."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    @property
    def spread(self) -> float:
        return self._costs.spread

    def seconds(self, windows: Sequence[TokenCount]) -> float:
        return self._costs.seconds([WindowWork.from_counts(tokens) for tokens in windows])


def configured_costs(config: SightlineConfig) -> CostModel:
    """The cost model of a configuration with ``engine: simulated``.

    Raises:
        ConfigError: none is named, there is none of that name, or it is another model's.
    """
    if config.simulated.costs is None:
        raise ConfigError(
            "engine: simulated needs simulated.costs, the cost model that says how long steps take: one of "
            f"{', '.join(names())}, or a file that `sightline bench cost --model {config.model.name} --out` wrote"
        )
    costs = load(config.simulated.costs)
    costs.check(config.model.name)
    return costs


def make_simulated(config: SightlineConfig, tiers: TierStack, instance: str) -> tuple[Engine, MemoryBank]:
    """The engine of replica ``instance``, with an empty memory bank.

    Raises:
        ConfigError: its costs or scores cannot be used.
        ModelError: there is no such model to stand in for.
    """
    import torch

    from cluster.engine.simulated import DEMO_SCORES, ScoreStatistics, SimulatedEngine
    from cluster.memory.bank import MemoryBank
    from cluster.models.loading import load_shape

    torch.set_num_threads(1)
    settings = config.simulated
    engine = SimulatedEngine(
        load_shape(config.model.name),
        ModelledSteps(configured_costs(config)),
        scores=DEMO_SCORES if settings.scores is None else ScoreStatistics.load(settings.scores),
        # A seed per replica, so that answers and variation are independent.
        seed=zlib.crc32(f"{settings.seed}:{instance}".encode()),
    )
    return engine, MemoryBank(tiers, default=config.memory.spec())
