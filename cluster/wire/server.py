"""A ``grpc.aio`` server with health, reflection, message limits and keepalive, the same for every process."""

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from sightline.v1 import ingest_pb2

from cluster.errors import CapacityError, ConfigError
from cluster.security.limits import AnonymousPool
from cluster.wire.channel import CLUSTER_MESSAGE_BYTES, KEEPALIVE, open_channel
from cluster.wire.convert import opening_from_proto, push_from_bytes
from cluster.wire.status import ErrorInterceptor, parsing, read_one
from cluster.wire.tls import PeerTls, TlsFiles, server_credentials

HEALTH = "grpc.health.v1.Health"
READ_S = 5.0
MOST_READING = 3
"""Maximum requests being read at once: each may be as large as the server's largest message."""
MOST_WATCHING = 64

Context: TypeAlias = grpc.aio.ServicerContext
Status = health_pb2.HealthCheckResponse


class HealthServicer:
    """``Check`` and ``Watch`` of the services ``names`` and of the server as a whole: SERVING until :meth:`shut_down`.

    An unknown name gets NOT_FOUND from ``Check``; ``Watch`` says SERVICE_UNKNOWN and ends. Calls that hold resources
    are limited: one too many evicts the oldest of the peer with the most, with RESOURCE_EXHAUSTED. A probe that sends
    its whole request at once is thus always answered.
    """

    def __init__(self) -> None:
        self.names: Iterable[str] = ()
        self._reading: AnonymousPool[asyncio.Timeout] = AnonymousPool(MOST_READING)
        self._watching: AnonymousPool[asyncio.Timeout] = AnonymousPool(MOST_WATCHING)
        self._over = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        """Add its methods to a server, as streams, so that gRPC does not read their requests by itself."""
        types = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, *types),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, *types),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH, methods),))

    def shut_down(self) -> None:
        """Report NOT_SERVING from now on, and end every ``Watch`` with it."""
        self._over.set()

    def _status(self, name: str) -> health_pb2.HealthCheckResponse:
        if name and name not in self.names:
            return Status(status=Status.SERVICE_UNKNOWN)
        return Status(status=Status.NOT_SERVING if self._over.is_set() else Status.SERVING)

    async def _check(self, _requests: Any, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._status(await self._name(context))
        if status.status == Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no service of that name")
        return status

    async def _watch(self, _requests: Any, context: Context) -> None:
        status = self._status(await self._name(context))
        await context.write(status)
        if status.status == Status.SERVING:
            async with self._held(self._watching, context):
                await self._over.wait()
            await context.write(Status(status=Status.NOT_SERVING))

    async def _name(self, context: Context) -> str:
        async with self._held(self._reading, context):
            return str((await read_one(context, READ_S)).service)

    @asynccontextmanager
    async def _held(self, pool: AnonymousPool[asyncio.Timeout], context: Context) -> AsyncIterator[None]:
        """Hold a place in ``pool`` for the block, until a newer call evicts it."""
        try:
            async with asyncio.timeout(None) as deadline:
                evicted = pool.add(deadline, host_of(context.peer()))
                if evicted is not None and not evicted.expired():
                    evicted.reschedule(0.0)
                try:
                    yield
                finally:
                    pool.discard(deadline)
        except TimeoutError:
            raise CapacityError("this took too long, or too many others called; ask again") from None


def host_of(peer: str) -> str:
    """Address without port of ``ServicerContext.peer()``, as in ``ipv4:10.0.0.7:4711``."""
    return peer.rpartition(":")[0]


async def is_serving(address: str, *, timeout_s: float = 1.0, tls: PeerTls | None = None) -> bool | None:
    """Whether the server at ``host:port`` reports SERVING; ``None``: no reply within ``timeout_s``."""
    async with open_channel(address, tls=tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s, wait_for_ready=False)
        except grpc.RpcError as error:
            return None if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


MAX_PACKET_BYTES = 4 * 2**20
HANDSHAKE_MS = 10_000
"""Timeout, in milliseconds, of a stranger's TLS handshake and first HTTP/2 frames."""


def push_message_bytes(max_packet_bytes: int) -> int:
    """Message limit of a server that accepts packets of ``max_packet_bytes``.

    A megabyte more, so that a packet slightly over the limit arrives and is refused with our sentence instead of
    gRPC's, and batches of small packets pass under a small limit.
    """
    return max_packet_bytes + 2**20


OPEN_S, REPLY_S = 10.0, 10.0
_parse_push = parsing(push_from_bytes, "/sightline.v1.Ingest/Push")


async def read_open(context: Context, open_s: float = OPEN_S) -> ingest_pb2.Open:
    """Read the first message of a push, which may be bytes. Raises ``TimeoutError``: none within ``open_s``;
    ``ValueError``: not ``open``, or a field is invalid; ``ConfigError``: not a message."""
    first = await read_one(context, open_s)
    return opening_from_proto(_parse_push(first) if isinstance(first, bytes) else first)


class Replies:
    """Writes one reply at a time. A reply that is not read stays pending, since core cannot withdraw it and sends no
    status before it; leaving by an error therefore waits until nothing is pending."""

    def __init__(self, context: Context, reply_s: float = REPLY_S) -> None:
        self._context = context
        self._reply_s = reply_s
        self._pending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            await self._drained()

    async def send(self, reply: ingest_pb2.PushReply | bytes) -> None:
        """Send a reply. Raises ``CapacityError``: the agent has not read earlier replies for ``reply_s``."""
        await self._drained()
        self._pending = asyncio.create_task(self._write(reply))
        await asyncio.wait({self._pending}, timeout=self._reply_s)
        if not self._pending.done():
            raise CapacityError(f"the agent has not read its replies for {self._reply_s:g} s; read them to get credit")

    @property
    def under_way(self) -> bool:
        return self._pending is not None and not self._pending.done()

    async def _drained(self) -> None:
        if self._pending is not None and self.under_way:
            await asyncio.wait({self._pending})

    async def _write(self, reply: ingest_pb2.PushReply | bytes) -> None:
        # A failed write means a lost connection, which also ends the handler's reads.
        with contextlib.suppress(Exception):
            await self._context.write(reply)


class RpcServer:
    """Add services, :meth:`bind`, :meth:`start`, :meth:`stop`; must be created on the event loop it runs on.

    ``guard``: interceptor that authorises every call; ``tls``: certificate of its ports, with ``PeerTls`` for processes
    of this cluster only; ``max_connections``: for servers that strangers reach, see :func:`_public`. Raises
    ``ConfigError``: the certificate cannot be used.
    """

    def __init__(
        self,
        *,
        max_message_bytes: int = CLUSTER_MESSAGE_BYTES,
        guard: grpc.aio.ServerInterceptor | None = None,
        tls: TlsFiles | PeerTls | None = None,
        max_connections: int | None = None,
    ) -> None:
        files, peer = (tls.files, tls.name) if isinstance(tls, PeerTls) else (tls, None)
        self._tls = None if files is None else server_credentials(files)
        errors = ErrorInterceptor(peer=peer)
        self._server = grpc.aio.server(
            interceptors=[errors] if guard is None else [errors, guard],
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                # Replies may be larger than requests from strangers: a fleet's camera list, for one.
                ("grpc.max_send_message_length", CLUSTER_MESSAGE_BYTES),
                # Otherwise a second server would silently share the port.
                ("grpc.so_reuseport", 0),
                *KEEPALIVE,
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                *(() if max_connections is None else _public(max_connections)),
            ],
        )
        self._health = HealthServicer()
        self._health.register(self._server)
        self.services: dict[str, Any] = {}

    def add(self, *servicers: Any) -> None:
        """Add servicers; each extends one or more generated ones, which name its services. An attribute ``handlers``
        replaces the generated method handlers."""
        for servicer in servicers:
            for base in type(servicer).__mro__:
                package, _, stubs = base.__module__.rpartition(".")
                if stubs.endswith("_pb2_grpc"):
                    name = f"{package}.{base.__name__.removesuffix('Servicer')}"
                    if handlers := getattr(servicer, "handlers", None):
                        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
                    else:
                        getattr(sys.modules[base.__module__], f"add_{base.__name__}_to_server")(servicer, self._server)
                    self.services[name] = servicer

    def bind(self, host: str, port: int, *, setting: str = "gateway.port") -> int:
        """Listen on ``host:port`` (0 takes any free port); returns the port. Raises ``ConfigError``: the port is in use
        or the address is not this machine's; the message says to change ``setting``."""
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound: int = self._server.add_insecure_port(where)
            else:
                bound = self._server.add_secure_port(where, self._tls)
        except RuntimeError:
            raise ConfigError(_why_not(host, port, setting)) from None
        return bound

    async def start(self) -> None:
        """Start serving; the health service then reports SERVING for every service and for the server as a whole."""
        reflection.enable_server_reflection([*self.services, HEALTH, reflection.SERVICE_NAME], self._server)
        self._health.names = frozenset(self.services)
        await self._server.start()

    async def stop(self, grace_s: float = 2.0) -> None:
        """Report NOT_SERVING, refuse new calls, give running ones ``grace_s`` seconds, then cancel them."""
        self._health.shut_down()
        async with asyncio.timeout(grace_s + 5.0):
            await self._server.stop(grace_s)


def _public(max_connections: int) -> list[tuple[str, int]]:
    """Options that bound the cost of unauthenticated callers: 60 KiB per connection, 32 KiB per pending call.

    gRPC cannot tell connections apart by peer or token: at ``max_connections`` it closes new ones until idle ones end.
    """
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # Idle means without calls; clients reconnect when they have one.
        ("grpc.max_connection_idle_ms", 30_000),
        ("grpc.max_concurrent_streams", 256),
        # Calls pending acceptance: from the first limit on some are refused, from the second on all.
        ("grpc.server.max_pending_requests", 256),
        ("grpc.server.max_pending_requests_hard_limit", 512),
        # At most 32 KiB are buffered for a stream that nobody reads; with its bandwidth probe gRPC would allow 4 MiB.
        # A message being read gets what it needs.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 32 * 1024),
        # Compressed messages are not decompressed, and are refused as invalid.
        ("grpc.per_message_decompression", 0),
    ]


def _why_not(host: str, port: int, setting: str) -> str:
    """Why binding failed, found with a plain socket: gRPC only logs the operating system's reason."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(target)
            probe.listen(1)
        reason = "gRPC could not bind it"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use on {host}; choose another with {setting} (0 takes any free one)"
        reason = error.strerror or str(error)
    return f"cannot listen on {host}:{port} ({reason}); choose another address with {setting.replace('port', 'host')}"
