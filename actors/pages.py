"""Where the ``/metrics`` of every process is, for the gateway's page, which shows them all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from actors.remote import ALERTING, NAMESPACE, RECONCILER, TIER, ask, controller

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Seconds that one process may take to say where its page is."""

NODE_DIGITS = 12
"""Of a Ray node's 56 in the name of its tier's process: enough to tell nodes apart, and to find one in Ray's list."""


def named() -> dict[str, Any]:
    """Handles by name of this cluster's processes that are asked themselves. Blocks, as long as Ray's own deadline
    allows; raises ``RayError``."""
    listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    names = [str(each["name"]) for each in listed if each["namespace"] == NAMESPACE]
    found = {}
    for name in names:
        if name in (ALERTING, RECONCILER) or name.startswith(TIER):
            # It may have gone since.
            with contextlib.suppress(ValueError):
                found[name] = ray.get_actor(name, namespace=NAMESPACE)
    return found


class Pages:
    """The controller knows decoders and replicas; alerting, the reconciler and the nodes' tiers are asked themselves,
    as long as Ray knows their names. One that does not answer is believed to be where it was, so that scraping it says
    that it is down.

    Args:
        look: :func:`named`.
    """

    def __init__(self, look: Callable[[], Mapping[str, Any]] = named) -> None:
        self._look = look
        self._known: dict[str, str] = {}

    async def addresses(self) -> dict[str, str]:
        """Process name -> ``host:port``.

        Raises:
            UnavailableError: the controller does not answer.
        """
        members: dict[str, str] = await ask(controller().metrics_addresses.remote())
        try:
            handles = await asyncio.to_thread(self._look)
        except RayError as error:
            log.warning("it is not known which processes there are: %s", error)
            return members | self._known
        found = await asyncio.gather(*(_page(name, handle) for name, handle in handles.items()))
        shown = [name[: len(TIER) + NODE_DIGITS] if name.startswith(TIER) else name for name in handles]
        places = {name: place or self._known.get(name) for name, place in zip(shown, found, strict=True)}
        self._known = {name: place for name, place in places.items() if place is not None}
        return members | self._known


async def _page(name: str, handle: Any) -> str | None:
    """``None``: it does not say."""
    try:
        if name == ALERTING:
            return str((await ask(handle.ready.remote(), timeout_s=ANSWER_S)).metrics)
        return str(await ask(handle.metrics_address.remote(), timeout_s=ANSWER_S))
    except Exception as error:
        # Why one process does not start is in its own log, and no reason not to see the others.
        log.debug("%s does not say where its metrics are: %s", name, error)
        return None
