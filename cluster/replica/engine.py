"""Creates a replica's configured model and engine. Heavy imports happen inside the functions."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from cluster.config import SightlineConfig
from cluster.config.root import every_camera
from cluster.control.costs import CostModel, WindowWork, load, names
from cluster.errors import ConfigError
from cluster.hosts import usable_cores

if TYPE_CHECKING:
    from cluster.engine.base import Engine
    from cluster.memory.bank import MemoryBank
    from cluster.memory.tiers.stack import TierStack
    from cluster.models.base import VisionLanguageModel

SIMULATED = "simulated"
"""Model fingerprint of the simulated engine's tiers, in which nothing is stored."""

WARNING = "engine: simulated runs no model: its answers are drawn at random, and are for load tests only"


def load_configured(config: SightlineConfig, neighbours: int) -> VisionLanguageModel:
    """Load the configured model; takes seconds to minutes. ``neighbours``: replicas that share this machine's cores,
    including this one. Raises ``ModelError``: the checkpoint or the device cannot be used; ``ConfigError``: the model
    does not support ``model.dtype`` or ``model.max_pixels``."""
    import torch

    from cluster.models.loading import load_model

    model = config.model
    # Ray starts its workers with one arithmetic thread.
    torch.set_num_threads(model.threads or max(1, usable_cores() // neighbours))
    return load_model(
        model.name,
        device=model.device,
        dtype=model.dtype,
        seed=model.seed,
        max_pixels=model.max_pixels,
        without_layers=config.engine == "vllm",
    )


def model_fingerprint(config: SightlineConfig, model: VisionLanguageModel) -> str:
    """Fingerprint of the model and engine; only replicas with the same one can read each other's memory."""
    from cluster.engine.vllm.settings import tier_fingerprint

    mark = model.fingerprint
    return tier_fingerprint(mark, config.vllm.arguments) if config.engine == "vllm" else mark


def make_engine(config: SightlineConfig, model: VisionLanguageModel, tiers: TierStack) -> tuple[Engine, MemoryBank]:
    """The configured engine and its memory bank; with vLLM the bank holds only windows."""
    from cluster.engine.native.engine import NativeEngine
    from cluster.memory.bank import MemoryBank

    bank = MemoryBank(tiers, default=every_camera(config).memory.spec())
    settings = config.model
    if config.engine == "vllm":
        return make_vllm_engine(config, model, tiers), bank
    engine = NativeEngine(
        model,
        score_temperature=settings.score_temperature,
        score_bias=settings.score_bias,
        max_new_tokens=settings.max_new_tokens,
        memories=bank,
        kv_bytes=settings.kv_bytes,
        host_kv_bytes=settings.host_kv_bytes,
        idle_kv_share=settings.idle_kv_share,
        waiting_bytes=config.tiers.device_bytes,
    )
    return engine, bank


def make_vllm_engine(config: SightlineConfig, model: VisionLanguageModel, tiers: TierStack) -> Engine:
    """The engine on vLLM, with its metrics registered beside ours. Raises ``ConfigError``: vLLM is not installed, or
    does not know an argument; ``ModelError``: it cannot serve the model here."""
    from cluster import metrics
    from cluster.engine.vllm.engine import VllmEngine
    from cluster.engine.vllm.settings import VllmSettings

    engine = VllmEngine(
        model,
        settings=VllmSettings(arguments=config.vllm.arguments, timeout_s=config.vllm.timeout_s),
        score_temperature=config.model.score_temperature,
        score_bias=config.model.score_bias,
        max_new_tokens=config.model.max_new_tokens,
        release=True,
        # A host tier alone does not outlive this process.
        tiers=tiers if len(tiers.tiers) > 1 else None,
    )
    from cluster.engine.vllm.core import VllmCollector

    metrics.REGISTRY.register(VllmCollector())
    return engine


def configured_costs(config: SightlineConfig) -> CostModel:
    """The cost model of a configuration with ``engine: simulated``. Raises ``ConfigError``: none is named, the name is
    unknown, or it was measured with another model."""
    if config.simulated.costs is None:
        raise ConfigError(
            f"engine: simulated needs simulated.costs, the cost model for step times: one of {', '.join(names())}, or "
            f"a file written by `sightline bench cost --model {config.model.name} --out`"
        )
    costs = load(config.simulated.costs)
    costs.check(config.model.name)
    return costs


def make_simulated(config: SightlineConfig, tiers: TierStack, instance: str) -> tuple[Engine, MemoryBank]:
    """The simulated engine of replica ``instance``, for load tests, with an empty memory bank. Raises ``ConfigError``:
    its costs or scores cannot be used; ``ModelError``: the model it stands in for is unknown."""
    import torch

    from cluster.engine.simulated import DEMO_SCORES, ScoreStatistics, SimulatedEngine
    from cluster.memory.bank import MemoryBank
    from cluster.models.loading import load_shape

    torch.set_num_threads(1)
    settings, costs = config.simulated, configured_costs(config)
    engine = SimulatedEngine(
        load_shape(config.model.name, config.model.max_pixels),
        lambda windows: costs.seconds([WindowWork.from_counts(tokens) for tokens in windows]),
        spread=costs.spread,
        scores=DEMO_SCORES if settings.scores is None else ScoreStatistics.load(settings.scores),
        # One seed per replica, so that their answers and step times are independent.
        seed=zlib.crc32(f"{settings.seed}:{instance}".encode()),
    )
    return engine, MemoryBank(tiers, default=every_camera(config).memory.spec())
