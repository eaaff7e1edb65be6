"""A gateway's view of other processes: the controller as directory of cameras, replicas and sessions; metrics
addresses; the other gateways."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from actors.remote import (
    ALERTING,
    NAMESPACE,
    RECONCILER,
    REMOTE_CONTROLLER,
    TIER,
    await_reply,
    find_actor,
    get_actor,
    is_gateway,
    short_tier,
)
from cluster.errors import UnavailableError
from cluster.security.sessions import CachedSessions, SessionStore

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Timeout for asking one process for its metrics address."""


def named(wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Handles, by name, of this cluster's processes whose name is ``wanted``. Blocks up to Ray's own deadline; raises
    ``RayError``."""
    listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    names = [str(each["name"]) for each in listed if each["namespace"] == NAMESPACE]
    # A process may have ended since it was listed.
    return {name: found for name in filter(wanted, names) if (found := find_actor(name)) is not None}


def asked_directly() -> dict[str, Any]:
    """Handles, by name, of the processes that only know their metrics address themselves; see :func:`named`."""
    return named(lambda name: name in (ALERTING, RECONCILER) or name.startswith(TIER))


class MetricsPages:
    """Metrics addresses of all processes. The controller knows those of decoders and replicas; alerting, the reconciler
    and the nodes' tiers are asked directly, as long as Ray lists them. A process that does not answer keeps its last
    address, or an empty one, so that scraping shows it as down."""

    def __init__(self, look: Callable[[], Mapping[str, Any]] = asked_directly) -> None:
        self._look = look
        self._known: dict[str, str] = {}

    async def addresses(self) -> dict[str, str]:
        """Process name -> ``host:port``. Raises ``UnavailableError``: the controller does not answer."""
        members = await REMOTE_CONTROLLER.metrics_addresses()
        try:
            handles = await asyncio.to_thread(self._look)
        except RayError as error:
            log.warning("cannot list the cluster's processes: %s", error)
            return members | self._known
        found = await asyncio.gather(*(_page(name, handle) for name, handle in handles.items()))
        shown = [short_tier(name) if name.startswith(TIER) else name for name in handles]
        self._known = {name: place or self._known.get(name, "") for name, place in zip(shown, found, strict=True)}
        return members | self._known


async def _page(name: str, handle: Any) -> str | None:
    """Metrics address of a process; ``None`` if it does not answer."""
    try:
        return str(await await_reply(handle.metrics_address.remote(), timeout_s=ANSWER_S))
    except Exception as error:
        # A process that does not start logs the reason itself, and must not hide the others.
        log.debug("cannot get the metrics address of %s: %s", name, error)
        return None


class ControllerDirectory:
    """``controller``, ``sessions``, and addresses of other processes."""

    def __init__(self) -> None:
        self.controller = REMOTE_CONTROLLER
        self.metrics_addresses = MetricsPages().addresses
        self.sessions: SessionStore = CachedSessions(REMOTE_CONTROLLER)

    async def gateways(self, but: str) -> dict[str, Any]:
        """Handles, by name, of all gateways except ``but``. Raises ``UnavailableError``."""
        try:
            return await asyncio.to_thread(named, lambda name: is_gateway(name) and name != but)
        except RayError as error:
            raise UnavailableError(f"cannot list the gateways, because Ray does not answer: {error}") from None

    async def alerting(self) -> str:
        """Address of ``Incidents`` behind the gateway, ``host:port``."""
        found = get_actor(ALERTING, "this cluster makes no incidents; alerts.enabled is off")
        return str(await await_reply(found.ready.remote(), who=ALERTING))
