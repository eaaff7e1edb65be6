"""Table of a cluster's processes other than replicas, for `sightline serve` and Kubernetes."""

import hashlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.alerting import Alerting
from actors.controller import Controller
from actors.decoder import Decoder
from actors.gateway import Gateway
from actors.reconciler import ReconcilerActor
from actors.remote import (
    ALERTING,
    CONTROLLER,
    NAMESPACE,
    RECONCILER,
    await_reply_blocking,
    controller,
    find_actor,
    gateway_names,
)
from actors.tier import TierNode, tier_name
from cluster.alerts.health import RULE_KEYS
from cluster.config import SightlineConfig
from cluster.config.alerts import AlertsConfig
from cluster.config.cluster import ClusterConfig, PlacementConfig
from cluster.config.sources import decoder_roots
from cluster.control.decoders import decoder_names
from cluster.errors import UnavailableError
from cluster.redaction import REVEAL

log = logging.getLogger(__name__)

DECODERS_S = 1.0
"""Timeout, in seconds, for asking the controller which decoders must run."""


def only(config: SightlineConfig, *sections: str) -> SightlineConfig:
    """The part of the configuration given to a process: these sections and the common ones, defaults for the rest. A
    process need not be restarted when a section changes that it is not given.

    Common are model and engine, which metrics name; security; cluster, except for the numbers of processes; and whether
    there are incidents.
    """
    kept = {"model", "engine", "security", "cluster", *sections}
    fields = SightlineConfig.model_fields
    given = {name: each.get_default(call_default_factory=True) for name, each in fields.items() if name not in kept}
    numbers = {"decoders": 1, "max_decoders": None, "replicas": 1}
    given["cluster"] = _without_gateways(config.cluster).model_copy(update=numbers)
    if "alerts" not in kept:
        given["alerts"] = _alerts(config)
    return config.model_copy(update=given)


def _alerts(config: SightlineConfig, *keys: str) -> AlertsConfig:
    """``alerts`` reduced to ``enabled`` and these keys."""
    return AlertsConfig(**{key: getattr(config.alerts, key) for key in ("enabled", *keys)})


def _without_gateways(cluster: ClusterConfig) -> ClusterConfig:
    """``cluster`` without the keys that only determine gateways."""
    placement = cluster.placement.model_copy(update={"gateway": None})
    return cluster.model_copy(update={"gateways": 1, "placement": placement})


@dataclass(frozen=True, slots=True)
class Process:
    """One Ray actor.

    * ``arguments``: of ``kind``'s constructor, the configuration first
    * ``role``: selects its nodes through ``cluster.placement``
    * ``keeps_state``: its ``stop()`` deletes what a restart needs, so a restart kills it instead
    * ``node``: the Ray node that it belongs to and ends with
    """

    name: str
    kind: type
    arguments: tuple[Any, ...]
    role: Literal["control", "gateway", "decoder", "replica"]
    keeps_state: bool = False
    node: str | None = None

    @property
    def digest(self) -> str:
        """Digest of name and configuration; a change requires a restart."""
        config: SightlineConfig = self.arguments[0]
        return hashlib.sha256(f"{self.name}\n{config.model_dump_json(context=dict(REVEAL))}".encode()).hexdigest()

    def start(self, placement: PlacementConfig, *, detached: bool = False) -> Any:
        """Start the actor and return its handle; ``detached``: it outlives the process that starts it. Raises
        ``ValueError``: an actor of that name exists."""
        where = None if self.node is None else NodeAffinitySchedulingStrategy(self.node, soft=False)
        resource = placement.of(self.role) if self.node is None else None
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000)(self.kind)
        options = remote.options(
            name=self.name,
            namespace=NAMESPACE,
            lifetime="detached" if detached else None,
            scheduling_strategy=where,
            resources=None if resource is None else {resource: 1.0},
        )
        return options.remote(*self.arguments)


def processes(
    config: SightlineConfig, run_id: str, host: str | None, decoders: Sequence[str] | None = None
) -> list[Process]:
    """Processes of a cluster except tiers, in starting order; ``host``: see :func:`actors.remote.own_host`;
    ``decoders``: their names, if the controller has chosen them."""
    decoders = decoder_names(config.cluster.decoders) if decoders is None else decoders
    # The controller hands out cameras and questions: no other process restarts when they change.
    elsewhere = {"alerts", "clips", "gateway", "asking", "tracing", "kubernetes"}
    controls = only(config, *SightlineConfig.model_fields.keys() - elsewhere)
    # The controller holds the sessions of all gateways: a change of gateways must not restart it.
    controls = controls.model_copy(update={"cluster": _without_gateways(config.cluster)})
    found = [Process(CONTROLLER, Controller, (controls, run_id, host), "control", keeps_state=True)]
    # Of the configured cameras, decoders need only the files that they may open.
    allowed = config.security.model_copy(update={"file_roots": decoder_roots(config)})
    # Clips begin before the windows that open an incident.
    opens = _alerts(config, "consecutive")
    decodes = only(config, "gateway", "clips", "tracing").model_copy(update={"security": allowed, "alerts": opens})
    found += [Process(name, Decoder, (decodes, name, host), "decoder") for name in decoders]
    serves = only(config, "gateway", "asking")
    there = serves.cluster.model_copy(update={"placement": config.cluster.placement})
    # Gateways rehearse rules.
    serves = serves.model_copy(update={"cluster": there, "alerts": _alerts(config, *RULE_KEYS)})
    found += [Process(name, Gateway, (serves, name), "gateway") for name in gateway_names(config.cluster.gateways)]
    if config.alerts.enabled:
        alerts = only(config, "alerts", "clips", "tracing")
        found.append(Process(ALERTING, Alerting, (alerts, run_id, host), "control", keeps_state=True))
    if config.kubernetes.enabled:
        found.append(Process(RECONCILER, ReconcilerActor, (only(config, "kubernetes"), host), "control"))
    return found


def wanted_processes(
    config: SightlineConfig, run_id: str, host: str | None, there: Collection[str]
) -> dict[str, Process]:
    """Processes that must run now, tiers included, by name; see :func:`processes`. If the number of decoders follows
    the load, the controller chooses them; while it does not answer, they are the initial ones and those among the
    existing processes ``there``."""
    decoders = decoder_names(config.cluster.decoders)
    if config.cluster.max_decoders is not None:
        try:
            decoders = await_reply_blocking(controller().decoder_names.remote(), timeout_s=DECODERS_S)
        except UnavailableError:
            decoders = sorted({*decoders, *(name for name in there if name.startswith("decoder-"))})
    every = (*processes(config, run_id, host, decoders), *tiers(config, host))
    return {each.name: each for each in every}


def tiers(config: SightlineConfig, host: str | None) -> list[Process]:
    """Tier processes: one per live node that may run replicas."""
    if not config.tiers.node:
        return []
    wanted = config.cluster.placement.replica
    nodes = [node for node in ray.nodes() if node["Alive"] and (wanted is None or node["Resources"].get(wanted))]
    names = {tier_name(node["NodeID"]): node["NodeID"] for node in nodes}
    held = only(config, "tiers")
    return [Process(name, TierNode, (held, name, host), "replica", node=node) for name, node in names.items()]


class Watchdog:
    """Has Ray restart hung processes: those that have answered once, and then not for ``stall_s``. A pause between two
    passes, such as one of the whole machine, counts for at most a quarter of that."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s, self._looked_s = stall_s, time.monotonic()
        # By name: the pending call, the seconds it has waited, and the process id that answered the previous one, or 0.
        self._asked: dict[str, tuple[Any, float, int]] = {}

    def running(self) -> dict[str, int]:
        """Process ids by name; 0: no answer since it started or died."""
        return {name: pid for name, (_, _, pid) in self._asked.items()}

    def restart_hung(self, names: Collection[str]) -> None:
        passed_s = min(time.monotonic() - self._looked_s, self._stall_s / 4)
        self._looked_s = time.monotonic()
        self._asked = {name: asked for name, asked in self._asked.items() if name in names}
        for name in names:
            if (process := find_actor(name)) is None:
                continue
            call, waited_s, pid = self._asked.get(name, (None, 0.0, 0))
            try:
                pid = 0 if call is None else ray.get(call, timeout=0)
            except GetTimeoutError:
                # Before its first answer it may still be starting, or waiting for a node.
                if not pid or waited_s < self._stall_s:
                    self._asked[name] = call, waited_s + passed_s, pid
                    continue
                log.error("%s hangs: it no longer answers, and is restarted", name)
                ray.kill(process, no_restart=False)
                pid = 0
            except RayError:
                pid = 0
            self._asked[name] = process.process_id.remote(), 0.0, pid
