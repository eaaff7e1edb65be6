"""Scheduling settings of a configuration: the cost model, the ladder and admission (``FleetSettings``)."""

from dataclasses import dataclass
from pathlib import Path

from cluster.config import CameraConfig, SightlineConfig
from cluster.config.root import resolve
from cluster.control.costs import CostModel, load, names
from cluster.control.demand import Demand
from cluster.control.fleet import Fleet
from cluster.control.ladder import FILE, FULL, Ladder, LadderPolicy, default
from cluster.errors import ConfigError
from cluster.hosts import gib, host_memory_bytes
from cluster.models.catalog import locate
from cluster.types import PatchGeometry
from cluster.types.cameras import INDEX, WAITING, Priority
from cluster.types.reports import CameraReport

UNMEASURED = CostModel(
    model="",
    device="",
    source="no cost model: every window counts alike",
    step_s=0.0,
    window_s=1e-6,
    encoded_s=0.0,
    computed_s=0.0,
    attended_s=0.0,
    spread=0.0,
    error=0.0,
)
"""Spreads cameras evenly by their rate, without ever filling a replica."""


# Assumed for a camera without pictures yet, and before a model is loaded.
_USUAL_SIZE = (1280, 720)
_USUAL_TOKENS, _USUAL_TEMPORAL = 256, 2


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """``costs``: of a replica; ``None`` if unknown, and no camera is refused for lack of time or reduced.
    ``admission``: refuse cameras that do not fit, in time only if ``timed``: costs were measured on such replicas."""

    costs: CostModel | None
    ladder: Ladder
    admission: bool = True
    high: float = 0.97
    low: float = 0.92
    max_batch: int = 8
    timed: bool = True

    def fleet(self) -> Fleet:
        return Fleet(
            self.costs or UNMEASURED,
            self.ladder,
            policy=LadderPolicy(
                self.ladder, high=self.high, aim=self.low + 2 / 3 * (self.high - self.low), low=self.low
            ),
            max_batch=self.max_batch,
            timed=self.timed and self.costs is not None,
        )


ALL_EQUAL = FleetSettings(None, Ladder((FULL,), "there is none"))
"""Settings without costs and ladder."""


def demand_of(settings: CameraConfig, geometry: PatchGeometry | None, size: tuple[int, int] | None = None) -> Demand:
    """A camera's demand at full quality; ``size``: width and height of its pictures, native pixels."""
    window, sampling = settings.window, settings.sampling
    tokens, temporal = _USUAL_TOKENS, _USUAL_TEMPORAL
    if geometry is not None:
        tokens, temporal = geometry.grid(*(size or _USUAL_SIZE)).tokens, geometry.temporal
    return Demand(
        camera=settings.name,
        priority=Priority.of(settings.priority),
        window_s=window.length_s,
        stride_s=window.stride_s,
        fps=sampling.fps,
        frame_tokens=tokens,
        temporal=temporal,
        questions=len(settings.questions),
        anchor_interval_s=sampling.anchor_interval_s,
        refresh_budget=window.refresh_budget,
        waiting_bytes=0 if (memory := settings.memory.spec()) is None else memory.cap_bytes // WAITING,
        rate=0.0 if settings.paused else 1.0,
    )


def observe_pictures(
    fleet: Fleet, settings: CameraConfig, report: CameraReport, geometry: PatchGeometry | None
) -> None:
    """Update a camera's demand in the fleet from its pictures' size and activity."""
    fleet.set_demand(settings.name, demand_of(settings, geometry, report.size))
    if report.picture is not None:
        fleet.observe_activity(settings.name, report.picture.changed)


def fleet_settings(config: SightlineConfig) -> FleetSettings:
    """Scheduling settings of a configuration. Raises ``ConfigError``: cost model or ladder cannot be read, or belong to
    another model."""
    scheduling = config.scheduling
    costs = _costs(config)
    ladder = ALL_EQUAL.ladder if costs is None or not scheduling.ladder else _ladder(config)
    if scheduling.low >= scheduling.high:
        raise ConfigError(
            f"scheduling.low = {scheduling.low:g} must be below scheduling.high = {scheduling.high:g}, or quality "
            "oscillates"
        )
    # Costs measured on another device may guide, but must not refuse a camera.
    timed = scheduling.costs is not None or config.engine == "simulated"
    return FleetSettings(
        costs, ladder, scheduling.admission, scheduling.high, scheduling.low, config.cluster.max_batch, timed
    )


def unknown_load(config: SightlineConfig) -> list[str]:
    """Warning that the load of the configured accelerator is unknown; empty if there are costs, or on a CPU."""
    on_accelerator = config.engine != "simulated" and config.model.device != "cpu"
    if config.scheduling.costs is not None or not on_accelerator:
        return []
    return [
        "scheduling.costs is not set: cameras are accepted regardless of load, and none is lowered under load; "
        f"measure costs with: sightline bench cost --model {config.model.name} --out costs.json"
    ]


def memory_shortages(config: SightlineConfig) -> list[str]:
    """Warnings that the lowest tier, unless it is Redis, or this machine cannot hold the memories of all cameras."""
    tiers, replicas = config.tiers, config.cluster.replicas
    here = config.cluster.ray_address is None and config.cluster.placement.replica is None
    host, wanted = replicas * tiers.rooms.get("host_bytes", 0), sum(_caps(config))
    # On several machines, each replica has at best a node of its own.
    node = tiers.rooms.get("node_bytes", 0) * (1 if here else replicas)
    lowest = ("tiers.node_bytes", node) if node else ("tiers.host_bytes", host)
    found = room_shortage(config, *lowest) if tiers.redis_url is None and lowest[1] else []
    needed, has = min(wanted, host) + min(wanted, node) + wanted // INDEX, host_memory_bytes()
    if here and needed > has:
        found.append(
            f"memories of {len(config.cameras)} cameras take up to {gib(needed)} of this machine's {gib(has)}, in "
            "tiers.host_bytes, tiers.node_bytes and indexes; lower memory.cap or these"
        )
    return found


def room_shortage(config: SightlineConfig, where: str, room: int) -> list[str]:
    """Warning that a tier of ``room`` bytes will evict memories of the configured cameras."""
    caps = _caps(config)
    if sum(caps) <= room:
        return []
    return [
        f"{where} is {gib(room)}, but {len(caps)} cameras at their memory.cap take {gib(sum(caps))}: the least "
        "recently used are evicted; raise it, or lower memory.cap"
    ]


def _caps(config: SightlineConfig) -> list[int]:
    if config.engine != "native":
        return []
    specs = (resolve(config, each).memory.spec() for each in config.cameras)
    return [spec.cap_bytes for spec in specs if spec is not None]


def _costs(config: SightlineConfig) -> CostModel | None:
    named = config.scheduling.costs or (config.simulated.costs if config.engine == "simulated" else None)
    if named is not None:
        costs = load(named)
        costs.check(config.model.name)
        return costs
    if config.engine != "native":
        return None
    if config.model.device != "cpu":
        # The kind of GPU is not known here.
        return None
    shipped = map(load, names())
    return next((each for each in shipped if each.model == config.model.name and "cpu" in each.device.lower()), None)


def _ladder(config: SightlineConfig) -> Ladder:
    if config.scheduling.ladder_file is not None:
        return Ladder.load(Path(config.scheduling.ladder_file))
    folder = Path(locate(config.model.name)).expanduser()
    return Ladder.load(folder) if (folder / FILE).is_file() else default()
