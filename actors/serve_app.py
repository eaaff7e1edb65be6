"""Sightline as Ray Serve applications, for deployment by a Serve configuration file: KubeRay, ``serve deploy``.

Two applications, so that a change of cameras or alerts does not reload the model::

    proxy_location: Disabled
    applications:
      - {name: processes, route_prefix: null, import_path: "actors.serve_app:processes", args: {configuration: ...}}
      - {name: replicas, route_prefix: null, import_path: "actors.serve_app:replicas", args: {configuration: ...}}

``configuration`` is the content of a configuration file. ``${NAME}`` in it is read from the environment of each Ray
process when it starts: a changed password takes effect in new pods. Both must be the same, except that ``replicas``
needs no sections in :data:`NOT_THE_REPLICAS`.
"""

from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application

from actors.replica import replica_application
from actors.supervisor import Supervisor
from cluster.config import SightlineConfig
from cluster.config.load import load_tree
from cluster.errors import ConfigError

NOT_THE_REPLICAS = (
    *("cameras", "questions", "sampling", "pruning", "window", "source"),
    *("alerts", "clips", "gateway", "kubernetes"),
)
"""Sections that replicas do not read: a camera's settings arrive with it."""


def processes(args: dict[str, Any]) -> Application:
    """Controller, gateway, decoders, alerting and tiers, run by a :class:`Supervisor`. Raises ``ConfigError``: invalid
    configuration."""
    given = _configuration(args)
    config = _load(given)
    place = config.cluster.placement.control
    deployment = serve.deployment(
        name="supervisor",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": {} if place is None else {place: 1.0}},
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=4 * config.cluster.stop_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )(Supervisor)
    return deployment.bind(partial(load_tree, given))


def replicas(args: dict[str, Any]) -> Application:
    """The replicas. Raises ``ConfigError``: invalid configuration."""
    given = {section: body for section, body in _configuration(args).items() if section not in NOT_THE_REPLICAS}
    return replica_application(_load(given), None, partial(load_tree, given))


def _configuration(args: dict[str, Any]) -> dict[str, Any]:
    # Not a typed parameter: Serve does not resolve annotations that are strings.
    if args.keys() != {"configuration"} or not isinstance(args["configuration"], dict):
        raise ConfigError(f"args must hold configuration, a mapping, and nothing else; they hold {sorted(args)}")
    return args["configuration"]


def _load(configuration: dict[str, Any]) -> SightlineConfig:
    config = load_tree(configuration)
    if config.cluster.ray_address is not None:
        raise ConfigError("cluster.ray_address has no meaning inside a Ray cluster; leave it out")
    security = config.security
    if security.internal_tls.certificate is None and not security.allow_plain_inside:
        raise ConfigError(
            "processes of a Ray cluster reach each other over the network, and without TLS so does anyone on it; set "
            "certificate, key and ca of security.internal_tls, or security.allow_plain_inside: true"
        )
    return config
