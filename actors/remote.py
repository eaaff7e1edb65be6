"""Calls to other actors with deadlines and Ray's errors translated into Sightline's; Ray's key-value store."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.experimental import internal_kv

from cluster.errors import UnavailableError

if TYPE_CHECKING:
    from actors.controller import Controller

NAMESPACE = "sightline"
CONTROLLER = "controller"
GATEWAY = "gateway"
"""The first gateway; see :func:`gateway_names`."""
ALERTING = "alerting"
RECONCILER = "reconciler"
TIER = "tier-"
"""Name prefix of tiers; the id of their Ray node follows."""

ANSWER_S = 8.0
"""Deadline of a call to the controller: below the client's for the gateway, so that the client learns who is silent."""
_SESSIONS = ("begin_session", "credential_of_session", "end_session")
REPLY_S = {"assignment": 20.0, "replicas": 20.0, "remove_camera": 60.0, **dict.fromkeys(_SESSIONS, 2.0)}
"""Deadlines by method where they differ: calls that the controller holds, up to 10 s for a change or some heartbeats
for a camera's memory to be deleted; and session calls, which every request with a cookie waits for."""

NODE_DIGITS = 12
"""Digits of a Ray node's 56-digit id used to name its tier in metrics: enough to find the node in Ray's list."""


def gateway_names(count: int) -> list[str]:
    """Names of ``count`` gateways."""
    return [GATEWAY, *(f"{GATEWAY}-{number}" for number in range(1, count))]


def is_gateway(name: str) -> bool:
    """Whether a process of this name is a gateway."""
    return name == GATEWAY or name.startswith(f"{GATEWAY}-")


def short_tier(name: str) -> str:
    """A tier's name in metrics."""
    return name[: len(TIER) + NODE_DIGITS]


def own_host(host: str | None) -> str:
    """Address on which a process listens for the rest of its cluster; ``None``: that of its Ray node."""
    return host or str(ray.util.get_node_ip_address())


ONE = "a process of the cluster"


async def await_reply(reply: Awaitable[Any], *, timeout_s: float = 10.0, who: str = ONE) -> Any:
    """Await the reply of ``who`` to ``handle.method.remote(...)``; raises what the method raised. Raises
    ``UnavailableError``: it is restarting, has ended or has not answered in time, or Ray itself does not answer."""
    try:
        # Not wait_for: in Python 3.11 it loses a cancellation that comes just after the reply.
        async with asyncio.timeout(timeout_s):
            return await reply
    except (RayError, TimeoutError) as error:
        raise _translated_error(error, timeout_s, who) from None


def await_reply_blocking(reply: Any, *, timeout_s: float = 10.0) -> Any:
    """:func:`await_reply` for a caller without an event loop."""
    try:
        return ray.get(reply, timeout=timeout_s)
    except RayError as error:
        raise _translated_error(error, timeout_s, ONE) from None


class _RemoteController:
    """Proxy for the controller's methods. Each raises what the method raises, and ``UnavailableError`` like
    :func:`await_reply`."""

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def ask(*arguments: Any, **options: Any) -> Any:
            reply = getattr(controller(), method).remote(*arguments, **options)
            return await await_reply(reply, timeout_s=REPLY_S.get(method, ANSWER_S), who="the controller")

        return ask


REMOTE_CONTROLLER = cast("Controller", _RemoteController())
"""The controller, for other processes."""


def _translated_error(error: Exception, timeout_s: float, who: str) -> Exception:
    if isinstance(error, RayTaskError):
        return cast(Exception, error.cause)
    if isinstance(error, RayActorError):
        return UnavailableError(f"{who} is restarting; try again in a moment")
    if isinstance(error, TimeoutError):
        return UnavailableError(f"{who} did not answer within {timeout_s:g} s; see its log")
    return UnavailableError(f"Ray does not answer: {error}")


def find_actor(name: str) -> Any:
    """Handle of an actor, valid across its restarts; ``None`` if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def get_actor(name: str, absent: str) -> Any:
    """:func:`find_actor`, but raises ``UnavailableError``: with the message ``absent`` if there is no such actor, or
    because Ray does not answer."""
    try:
        found = find_actor(name)
    except RayError as error:
        raise UnavailableError(f"cannot find the {name}, because Ray does not answer: {error}") from None
    if found is None:
        raise UnavailableError(absent)
    return found


def controller() -> Any:
    """Handle of the controller. Raises ``UnavailableError`` without one."""
    return get_actor(CONTROLLER, "the cluster has no controller")


class RayTable:
    """A namespace of Ray's key-value store, which outlives actors and ends with Ray
    (:class:`cluster.control.cameras.table.Table`)."""

    durable = False

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace.encode()

    def get(self, key: str) -> bytes | None:
        found: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=self._namespace)
        return found

    def write(self, put: Mapping[str, bytes], delete: Sequence[str] = ()) -> None:
        for key, value in put.items():
            internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=self._namespace)
        for key in delete:
            internal_kv._internal_kv_del(key.encode(), namespace=self._namespace)

    def keys(self, prefix: str) -> list[str]:
        found = internal_kv._internal_kv_list(prefix.encode(), namespace=self._namespace)
        return sorted(key.decode() for key in found)
