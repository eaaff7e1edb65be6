"""What a configuration says of scheduling: the cost model, the ladder, and what may be refused."""

from __future__ import annotations

from pathlib import Path

from cluster.config import SightlineConfig
from cluster.control.costs import CostModel, load, names
from cluster.control.ladder import FILE, Ladder, default
from cluster.control.quality import ALL_EQUAL, FleetSettings
from cluster.errors import ConfigError
from cluster.models.catalog import locate


def fleet_settings(config: SightlineConfig) -> FleetSettings:
    """What a configuration says of scheduling.

    Raises:
        ConfigError: the cost model or the ladder cannot be read, or is another model's.
    """
    scheduling = config.scheduling
    costs = _costs(config)
    ladder = ALL_EQUAL.ladder if costs is None or not scheduling.ladder else _ladder(config)
    if scheduling.low >= scheduling.high:
        raise ConfigError(
            f"scheduling.low = {scheduling.low:g} must be below scheduling.high = {scheduling.high:g}: quality would "
            "rise and fall by turns"
        )
    # Costs that were measured on another machine may guide, but must not turn a camera away.
    admission = scheduling.admission and (scheduling.costs is not None or config.engine == "simulated")
    return FleetSettings(costs, ladder, admission, scheduling.high, scheduling.low, config.cluster.max_batch)


def _costs(config: SightlineConfig) -> CostModel | None:
    named = config.scheduling.costs or (config.simulated.costs if config.engine == "simulated" else None)
    if named is not None:
        costs = load(named)
        costs.check(config.model.name)
        return costs
    if config.engine != "native":
        return None
    device = config.model.device.partition(":")[0]
    found = [each for each in map(load, names()) if _same(each, config.model.name, device)]
    return found[0] if found else None


def _same(costs: CostModel, model: str, device: str) -> bool:
    try:
        costs.check(model)
    except ConfigError:
        return False
    # Which GPU a replica will have is known to nobody here.
    return device == "cpu" and "cpu" in costs.device.lower()


def _ladder(config: SightlineConfig) -> Ladder:
    if config.scheduling.ladder_file is not None:
        return Ladder.load(Path(config.scheduling.ladder_file))
    folder = Path(locate(config.model.name)).expanduser()
    return Ladder.load(folder) if (folder / FILE).is_file() else default()
