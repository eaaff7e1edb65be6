"""Connection to the node of a remote tier: calls with deadlines, failure detection and recovery."""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import grpc.aio
from sightline.v1 import kv_pb2, kv_pb2_grpc

from cluster.codec.supervisor import Backoff
from cluster.memory.tiers.kv_wire import INSTANCE
from cluster.wire.channel import CallEndedError, EventLoopThread, open_channel, split_address
from cluster.wire.status import to_error
from cluster.wire.tls import PeerTls

T = TypeVar("T")

log = logging.getLogger(__name__)

_GRACE_S = 0.25
"""The event loop gets this much longer than a call to say that its deadline passed."""

_REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)


class TransferTimeoutError(Exception):
    """The deadline passed during a transfer."""


TROUBLE = (grpc.RpcError, CallEndedError, TimeoutError, CancelledError, TransferTimeoutError)
"""What a call may end with that is no defect of this side."""


class KVPeer:
    """gRPC channel to one node, on its own event loop; thread-safe.

    After a failed call the node is down and calls are refused; a background task probes it with exponential backoff
    until it answers. A restarted node may have another address, which ``find`` looks up before each probe. A changed
    instance counts as a failure, as its blocks are lost.

    Args:
        address: ``host:port``.
        fingerprint: sent with probes.
        deadline_s: of every call.
        backoff: pauses between probes.
        find: looks up the node's current address, on a separate thread and never concurrently; on any exception the
            last address is used.
        tls: of this cluster's processes.
    """

    def __init__(
        self,
        address: str,
        *,
        fingerprint: str,
        deadline_s: float,
        backoff: Backoff,
        find: Callable[[], str] | None = None,
        tls: PeerTls | None = None,
    ) -> None:
        self.address, self._fingerprint, self._deadline_s = address, fingerprint, deadline_s
        self._backoff, self._find, self._tls = backoff, find, tls
        self._looking: asyncio.Future[str] | None = None
        self._instance: str | None = None
        self._renewals = 0
        self._lock = threading.Lock()
        self._up, self._closed, self._reason, self._failures = True, False, "", 0
        self._counts: Counter[str] = Counter()
        self._thread = EventLoopThread(f"kv {address}")
        self._channel: grpc.aio.Channel
        self.stub: Any
        self._thread.run(self._connect(address), 5.0)

    def ready(self) -> bool:
        with self._lock:
            return self._up

    def state(self) -> tuple[bool, str, Counter[str]]:
        """Whether it is up, why not, and the numbers of calls that were ``failures``, ``refused`` and ``late``.
        ``failures`` includes changed instances, which ``restarts`` counts alone."""
        with self._lock:
            return self._up, self._reason, self._counts.copy()

    def call(self, method: Callable[..., Any], request: Any) -> Any:
        """Reply to one request, or None on failure."""
        if self.ready():
            with self.recorded():
                return self.run(self._unary(method, request), time.monotonic() + self._deadline_s)
        return None

    def run(self, work: Coroutine[Any, Any, T], until: float) -> T:
        """Run a coroutine on the event loop; ``TimeoutError`` if it did not end by ``until`` (monotonic),
        ``CancelledError`` if the peer was closed."""
        try:
            return self._thread.run(work, max(0.0, until - time.monotonic()) + _GRACE_S)
        except RuntimeError:
            if not self._closed:
                raise
            work.close()
            raise CancelledError from None

    def cancel_call(self, call: Any) -> None:
        # If closed meanwhile, the loop and the call are gone.
        with contextlib.suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(call.cancel)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Context of a call: records whether it succeeds. Trouble ends it without an exception."""
        try:
            yield
        except TROUBLE as error:
            self.record_failure(error)
        else:
            with self._lock:
                self._failures = 0

    def record_failure(self, error: BaseException) -> None:
        """Record a failed call. The node is then down, unless it only refused or was slow. Thread-safe."""
        with self._lock:
            if isinstance(error, TransferTimeoutError):
                self._counts["late"] += 1
            elif isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSED:
                self._counts["refused"] += 1
            else:
                self._counts["failures"] += 1
                if self._up:
                    self._up, self._reason = False, self._why(error)
                    self._failures += 1
                    asyncio.run_coroutine_threadsafe(self._recover(), self._thread.loop)

    async def check_instance(self, call: Any) -> None:
        """Compare the instance that answers with the last one."""
        found = dict(await call.initial_metadata()).get(INSTANCE)
        with self._lock:
            if found is not None and found != self._instance:
                if self._instance is not None:
                    self._counts["failures"] += 1
                    self._counts["restarts"] += 1
                self._instance = found

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed, self._up, self._reason = True, False, f"the connection to {self.address} was closed"
        with contextlib.suppress(TimeoutError):
            self._thread.run(self._channel.close(), 5.0)
        self._thread.stop()

    def _why(self, error: BaseException) -> str:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the tier at {self.address} cannot be used: {to_error(error)}"
        return f"the tier at {self.address} did not answer within {self._deadline_s:g} s"

    async def _recover(self) -> None:
        usage = kv_pb2.UsageRequest(fingerprint=self._fingerprint)
        while not self._closed:
            await asyncio.sleep(self._backoff.delay_s(self._failures - 1, random.random()))
            reason = ""
            try:
                await self._reconnect(await self._found())
                await self._unary(self.stub.Usage, usage)
            except Exception as error:
                reason = self._why(error)
            with self._lock:
                if not self._closed:
                    self._up, self._reason = not reason, reason
                if not reason:
                    return
                self._failures += 1

    async def _connect(self, address: str) -> None:
        renewals = 0 if self._tls is None else self._tls.renewals()
        channel = open_channel(address, tls=self._tls)
        self.address, self._renewals = address, renewals
        self._channel, self.stub = channel, kv_pb2_grpc.KVStub(channel)

    async def _found(self) -> str:
        """Look up the node's address; the last one if that fails or takes too long."""
        if self._find is None:
            return self.address
        if self._looking is None:
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._find))
        await asyncio.wait([self._looking], timeout=self._deadline_s)
        if not self._looking.done():
            return self.address
        looked, self._looking = self._looking, None
        try:
            address = looked.result()
            split_address(address)
        except Exception as error:
            log.info("cannot look up the tier that was at %s: %s", self.address, error)
            return self.address
        return address

    async def _reconnect(self, address: str) -> None:
        """Open a new channel if the address or the certificate changed."""
        if address != self.address or (self._tls is not None and self._tls.renewals() != self._renewals):
            old = self._channel
            await self._connect(address)
            await old.close()

    async def _unary(self, method: Callable[..., Any], request: Any) -> Any:
        call = method(request, timeout=self._deadline_s)
        reply = await call
        await self.check_instance(call)
        return reply
