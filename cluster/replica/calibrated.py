"""The calibrated engine of a replica: a cost model's seconds, recorded answers, no memory. For load tests only."""

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

CALIBRATED = "calibrated"
"""What its tiers know as the model's fingerprint; nothing is put into them."""

WARNING = "engine: calibrated runs no model: its answers are drawn at random, and are for load tests only"


class ModelledSteps:
    """A cost model as the engine asks for it (:class:`cluster.engine.calibrated.StepCosts`)."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    @property
    def spread(self) -> float:
        return self._costs.spread

    def seconds(self, windows: Sequence[TokenCount]) -> float:
        return self._costs.seconds([WindowWork.counted(tokens) for tokens in windows])


def configured_costs(config: SightlineConfig) -> CostModel:
    """The cost model of a configuration with ``engine: calibrated``.

    Raises:
        ConfigError: none is named, there is none of that name, or it is another model's.
    """
    if config.calibrated.costs is None:
        raise ConfigError(
            "engine: calibrated needs calibrated.costs, the cost model that says how long steps take: one of "
            f"{', '.join(names())}, or a file that `sightline bench cost --model {config.model.name} --out` wrote"
        )
    costs = load(config.calibrated.costs)
    costs.check(config.model.name)
    return costs


def make_calibrated(config: SightlineConfig, tiers: TierStack, instance: str) -> tuple[Engine, MemoryBank]:
    """The engine of replica ``instance``, and the memories that every replica has and this one leaves empty.

    Raises:
        ConfigError: its costs or scores cannot be used.
        ModelError: there is no such model to stand in for.
    """
    import torch

    from cluster.engine.calibrated import DEMO_SCORES, CalibratedEngine, ScoreStatistics, shape_of
    from cluster.memory.bank import MemoryBank

    torch.set_num_threads(1)
    settings = config.calibrated
    engine = CalibratedEngine(
        shape_of(config.model.name),
        ModelledSteps(configured_costs(config)),
        scores=DEMO_SCORES if settings.scores is None else ScoreStatistics.load(settings.scores),
        # Replicas must not answer and scatter in step.
        seed=zlib.crc32(f"{settings.seed}:{instance}".encode()),
    )
    return engine, MemoryBank(tiers, default=config.memory.spec())
