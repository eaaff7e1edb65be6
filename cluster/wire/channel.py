"""gRPC channels: one set of options for every client, channels pooled by address, and reads and writes of calls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc.aio
from grpc._cython import cygrpc

from cluster.errors import ConfigError, UnavailableError
from cluster.hosts import is_loopback
from cluster.wire.tls import PeerTls

Call: TypeAlias = grpc.aio.StreamStreamCall

_STATUS_S = 5.0


class CallEndedError(Exception):
    """Nothing more can be written; reading yields the call's status."""


async def write(call: Call, message: Any) -> None:
    """Send one message, or its bytes, waiting for flow control. Raises ``CallEndedError``: the call has ended, or never
    connected."""
    if call.done():
        raise CallEndedError
    await call._metadata_sent.wait()
    try:
        await call._cython_call.send_serialized_message(
            message if isinstance(message, bytes) else message.SerializeToString()
        )
    except cygrpc.InternalError:
        raise CallEndedError from None


async def finish(call: Call) -> None:
    """After :class:`CallEndedError`: cancel the call for its reader, unless core delivers a status by itself first."""
    await asyncio.sleep(_STATUS_S)
    call.cancel()


async def read(call: Call) -> Any:
    """The next message, or ``grpc.aio.EOF``.

    Raises:
        grpc.aio.AioRpcError: the server ended the call, or the connection broke.
        UnavailableError: :func:`finish` cancelled the call; its ``CancelledError`` must not end the reader's task.
    """
    try:
        return await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnavailableError("the connection ended without a status") from None


async def first_reply(call: Call, opening: Any, timeout_s: float) -> Any:
    """Write the first message of a call and read the first reply, or ``grpc.aio.EOF``. Raises ``TimeoutError``: no
    reply in time; ``grpc.aio.AioRpcError``: the server ended the call."""
    async with asyncio.timeout(timeout_s):
        with contextlib.suppress(CallEndedError):
            await write(call, opening)
        return await call.read()


ChannelOptions = list[tuple[str, int | str]]

KEEPALIVE: ChannelOptions = [
    ("grpc.keepalive_time_ms", 20_000),
    # This alone bounds only how long TCP waits for acknowledgements, and a ping waits a minute for its reply.
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Short calls one after another on a dead connection would otherwise keep it: none is under way when a ping is due.
    ("grpc.keepalive_permit_without_calls", 1),
]
"""Ends a connection, of a client or a server, whose other side is silent for 20 to 30 s."""

CLUSTER_MESSAGE_BYTES = 64 * 2**20
"""Maximum message size inside the cluster: a complete frame of 2 x 2048 x 2048 pixels takes 25 MiB."""


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` (IPv6 in brackets). Raises ``ConfigError``: anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not an address; write HOST:PORT, as in 127.0.0.1:50051")
    return host.strip("[]"), int(port)


def channel_options(address: str, *, internal: bool) -> ChannelOptions:
    """Options of a channel; ``internal`` ones and those to this machine bypass HTTP proxies from the environment.

    Reconnection backoff is short (0.1 to 2 s), since gRPC's default of up to two minutes would outlast our deadlines;
    subchannel pools are local, so that one caller's failed connection attempts do not delay another's.
    """
    options: ChannelOptions = [
        ("grpc.max_receive_message_length", CLUSTER_MESSAGE_BYTES),
        ("grpc.max_send_message_length", CLUSTER_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Not a pause, but the timeout of an attempt: with TLS, several round trips of an edge agent's slow link.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.use_local_subchannel_pool", 1),
        *KEEPALIVE,
    ]
    if internal or is_loopback(split_address(address)[0]):
        options.append(("grpc.enable_http_proxy", 0))
    return options


Tls: TypeAlias = grpc.ChannelCredentials | PeerTls | None


def open_channel(address: str, *, internal: bool = True, tls: Tls = None) -> grpc.aio.Channel:
    """Open an unconnected ``grpc.aio`` channel, with TLS if ``tls`` is given; the caller closes it."""
    channel: grpc.aio.Channel = _open(grpc.aio, address, internal, tls)
    return channel


def open_blocking_channel(address: str, *, internal: bool = True, tls: Tls = None) -> grpc.Channel:
    """:func:`open_channel` for blocking calls."""
    channel: grpc.Channel = _open(grpc, address, internal, tls)
    return channel


def _open(library: Any, address: str, internal: bool, tls: Tls) -> Any:
    options = channel_options(address, internal=internal)
    if isinstance(tls, PeerTls):
        options += tls.options()
        tls = tls.credentials()
    if tls is None:
        return library.insecure_channel(address, options)
    return library.secure_channel(address, tls, options)


class ChannelPool:
    """One channel per address while anyone uses it, so that none is left open to a process that moved.

    After the certificate in ``tls`` is renewed, new users get a new channel; users of the old one keep it.
    """

    def __init__(self, *, tls: PeerTls | None = None) -> None:
        self._tls = tls
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}
        self._users: dict[tuple[str, int], int] = {}

    @asynccontextmanager
    async def lease(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Lease the channel to ``address``, which is closed when its last user leaves."""
        key = (address, 0 if self._tls is None else self._tls.renewals())
        if key not in self._channels:
            self._channels[key] = open_channel(address, tls=self._tls)
        self._users[key] = self._users.get(key, 0) + 1
        try:
            yield self._channels[key]
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                await self._channels.pop(key).close()
