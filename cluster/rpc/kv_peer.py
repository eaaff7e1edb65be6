"""The node at the other end of a remote tier: calls with a deadline, and whether it is up."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import grpc.aio
from sightline.v1 import kv_pb2, kv_pb2_grpc

from cluster.codec.supervisor import Backoff
from cluster.rpc.calls import CallEndedError
from cluster.rpc.channel import open_channel
from cluster.rpc.loop import EventLoopThread
from cluster.rpc.status import to_error
from cluster.rpc.tls import PeerTls

T = TypeVar("T")

_GRACE_S = 0.25
"""The event loop gets this much longer than a call to say that its deadline passed."""

_REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)


class OutOfTimeError(Exception):
    """The deadline passed while blocks were coming."""


TROUBLE = (grpc.RpcError, CallEndedError, TimeoutError, CancelledError, OutOfTimeError)
"""What a call may end with that is no defect of this side; for :meth:`KVPeer.failed`."""


class KVPeer:
    """A channel to one node, on an event loop of its own; thread-safe.

    Once a call failed the node is down, and nobody need call it: it is asked from here, after a pause that grows until
    a call succeeds again, and is up once it has answered.

    Args:
        address: ``host:port``.
        fingerprint: sent with what is asked from here.
        deadline_s: of every call.
        backoff: pauses between questions to a node that is down.
        tls: of this cluster's processes.
    """

    def __init__(
        self, address: str, *, fingerprint: str, deadline_s: float, backoff: Backoff, tls: PeerTls | None = None
    ) -> None:
        self._address, self._fingerprint, self._deadline_s = address, fingerprint, deadline_s
        self._backoff, self._tls = backoff, tls
        self._renewals = 0
        self._lock = threading.Lock()
        self._up, self._closed, self._reason, self._failures = True, False, "", 0
        self._counts: Counter[str] = Counter()
        self._thread = EventLoopThread(f"kv {address}")
        self._channel, self.stub = self._thread.run(self._connect(), 5.0)

    def ready(self) -> bool:
        """Whether it is worth calling."""
        with self._lock:
            return self._up

    def state(self) -> tuple[bool, str, Counter[str]]:
        """Whether it is up, why not, and how many calls were ``failures``, ``refused`` and ``late``."""
        with self._lock:
            return self._up, self._reason, self._counts.copy()

    def ask(self, method: Callable[..., Any], request: Any) -> Any:
        """The reply to one request, or None when there is none."""
        if not self.ready():
            return None
        until = time.monotonic() + self._deadline_s
        try:
            reply = self.run(_unary(method, request, self._deadline_s), until)
        except TROUBLE as error:
            self.failed(error)
            return None
        self.worked()
        return reply

    def run(self, work: Coroutine[Any, Any, T], until: float) -> T:
        """What ``work`` returns, run on the event loop.

        Raises:
            TimeoutError: it did not end by ``until`` (monotonic).
            CancelledError: the peer was closed.
        """
        try:
            return self._thread.run(work, max(0.0, until - time.monotonic()) + _GRACE_S)
        except RuntimeError:
            if not self._closed:
                raise
            work.close()
            raise CancelledError from None

    def end(self, call: Any) -> None:
        """Give up a call, if it still runs."""
        # Closed meanwhile, the loop is gone and the call with it.
        with contextlib.suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(call.cancel)

    def worked(self) -> None:
        """A call succeeded."""
        with self._lock:
            self._failures = 0

    def failed(self, error: BaseException) -> None:
        """A call failed. The node is down, unless it only refused or was slow; several threads may find out at once."""
        with self._lock:
            if isinstance(error, OutOfTimeError):
                self._counts["late"] += 1
            elif isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSED:
                self._counts["refused"] += 1
            else:
                self._counts["failures"] += 1
                if self._up:
                    self._up, self._reason = False, self._why(error)
                    self._failures += 1
                    asyncio.run_coroutine_threadsafe(self._recover(), self._thread.loop)

    def close(self) -> None:
        """End what runs; harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._up, self._reason = True, False, f"the connection to {self._address} was closed"
        with contextlib.suppress(TimeoutError):
            self._thread.run(self._channel.close(), 5.0)
        self._thread.stop()

    def _why(self, error: BaseException) -> str:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the tier at {self._address} cannot be used: {to_error(error)}"
        return f"the tier at {self._address} did not answer within {self._deadline_s:g} s"

    async def _recover(self) -> None:
        usage = kv_pb2.UsageRequest(fingerprint=self._fingerprint)
        while not self._closed:
            await asyncio.sleep(self._backoff.delay_s(self._failures - 1, random.random()))
            reason = ""
            await self._reconnect()
            try:
                await self.stub.Usage(usage, timeout=self._deadline_s)
            except Exception as error:
                reason = self._why(error)
            with self._lock:
                if not self._closed:
                    self._up, self._reason = not reason, reason
                if not reason:
                    return
                self._failures += 1

    async def _connect(self) -> tuple[grpc.aio.Channel, Any]:
        self._renewals = 0 if self._tls is None else self._tls.renewals()
        channel = open_channel(self._address, tls=self._tls)
        return channel, kv_pb2_grpc.KVStub(channel)

    async def _reconnect(self) -> None:
        """Over a new channel, if the certificate was renewed since this one was opened."""
        if self._tls is not None and self._tls.renewals() != self._renewals:
            old = self._channel
            self._channel, self.stub = await self._connect()
            await old.close()


async def _unary(method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
    return await method(request, timeout=timeout_s)
