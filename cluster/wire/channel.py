"""Channels: one set of options for every client, and channels shared by address."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Self, TypeAlias, TypeVar

import grpc.aio
from grpc._cython import cygrpc

from cluster.errors import ConfigError, UnavailableError
from cluster.hosts import is_loopback
from cluster.wire.tls import PeerTls

Call: TypeAlias = grpc.aio.StreamStreamCall

_STATUS_S = 5.0


class CallEndedError(Exception):
    """Nothing more can be written; reading gives the call's status."""


async def write(call: Call, message: Any) -> None:
    """Send one message, waiting for flow control.

    Raises:
        CallEndedError: the call is over, or was never connected.
    """
    if call.done():
        raise CallEndedError
    await call._metadata_sent.wait()
    try:
        await call._cython_call.send_serialized_message(message.SerializeToString())
    except cygrpc.InternalError:
        raise CallEndedError from None


async def finish(call: Call) -> None:
    """After :class:`CallEndedError`: core normally delivers the status by itself; if not, cancel for the reader."""
    await asyncio.sleep(_STATUS_S)
    call.cancel()


async def read(call: Call) -> Any:
    """The next message, or ``grpc.aio.EOF``.

    Raises:
        grpc.aio.AioRpcError: the server ended the call, or the connection did.
        UnavailableError: :func:`finish` ended it. ``CancelledError`` is then not meant for the reader's task, which
            would end with it for good.
    """
    try:
        return await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnavailableError("the connection ended without a status") from None


async def first_reply(call: Call, opening: Any, timeout_s: float) -> Any:
    """Write the first message of a call and read the first reply, or ``grpc.aio.EOF``.

    Raises:
        TimeoutError: no reply in time.
        grpc.aio.AioRpcError: the server ended the call.
    """
    async with asyncio.timeout(timeout_s):
        with contextlib.suppress(CallEndedError):
            await write(call, opening)
        return await call.read()


T = TypeVar("T")


class EventLoopThread:
    """Starts at once; :meth:`run` hands it coroutines from any other thread. A context manager."""

    def __init__(self, name: str = "grpc") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The coroutine's result, or its exception; ``TimeoutError`` (and cancellation) after ``timeout_s``."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs and end the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self.loop.close()


ChannelOptions = list[tuple[str, int | str]]

CLUSTER_MESSAGE_BYTES = 64 * 2**20
"""Largest message inside the cluster: a complete frame of 2 x 2048 x 2048 pixels takes 25 MiB."""


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` (IPv6 in brackets) as its two parts.

    Raises:
        ConfigError: anything else.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not an address; write HOST:PORT, as in 127.0.0.1:50051")
    return host.strip("[]"), int(port)


def channel_options(address: str, *, internal: bool) -> ChannelOptions:
    """``internal`` calls and those to this machine never go through an HTTP proxy from the environment.

    Connecting again is fast (0.1 to 2 s) because gRPC's default of up to two minutes would outlast our own deadlines;
    pools are local so that one caller's failed connects do not hold back another's.
    """
    options: ChannelOptions = [
        ("grpc.max_receive_message_length", CLUSTER_MESSAGE_BYTES),
        ("grpc.max_send_message_length", CLUSTER_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if internal or is_loopback(split_address(address)[0]):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def open_channel(
    address: str,
    *,
    internal: bool = True,
    tls: grpc.ChannelCredentials | PeerTls | None = None,
) -> grpc.aio.Channel:
    """An unconnected ``grpc.aio`` channel, with TLS where ``tls`` is given; the caller closes it."""
    options = channel_options(address, internal=internal)
    if isinstance(tls, PeerTls):
        options += tls.options()
        tls = tls.credentials()
    return (
        grpc.aio.insecure_channel(address, options) if tls is None else grpc.aio.secure_channel(address, tls, options)
    )


class ChannelPool:
    """One channel per address while anyone uses it: a decoder that moved to another port leaves none behind.

    After a renewal of the certificate in ``tls`` new users get a new channel; those of the old one keep theirs.
    """

    def __init__(self, *, tls: PeerTls | None = None) -> None:
        self._tls = tls
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}
        self._users: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        return len(self._channels)

    @asynccontextmanager
    async def lease(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to ``address``; closed when its last user leaves."""
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
