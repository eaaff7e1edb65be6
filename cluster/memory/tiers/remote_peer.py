"""Connection to the node of a remote tier: calls with deadlines, failure detection and recovery."""

import contextlib
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import grpc
from sightline.v1 import kv_pb2, kv_pb2_grpc

from cluster.codec.supervisor import Backoff
from cluster.memory.tiers.kv_wire import INSTANCE
from cluster.wire.channel import CallEndedError, open_blocking_channel, split_address
from cluster.wire.status import to_error
from cluster.wire.tls import PeerTls

log = logging.getLogger(__name__)

_REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)

CALL_ERRORS = (grpc.RpcError, CallEndedError)
"""Errors of a call that are not a bug on this side."""


class Transfer:
    """One call to the node. ``moved_s``: when a message of its stream was last sent or received (monotonic)."""

    def __init__(self, peer: "KVPeer") -> None:
        self._peer = peer
        self._deadline_s = time.monotonic() + peer.deadline_s
        self.moved_s = -math.inf

    def send(self, method: str, messages: Iterable[Any]) -> Any:
        """Send a stream of messages and return the reply; a refusal may come before the last message is sent."""
        return self.ask(method, self._watched(messages))

    def ask(self, method: str, request: Any) -> Any:
        """Send one request and return the reply."""
        reply, call = self._begin(getattr(self._peer.stub, method).with_call, request)
        self._peer.check_instance(call)
        return reply

    def receive(self, method: str, request: Any) -> Iterator[Any]:
        """Send one request and yield the messages of the reply."""
        call = self._begin(getattr(self._peer.stub, method), request)
        try:
            for number, message in enumerate(self._watched(call)):
                if not number:
                    self._peer.check_instance(call)
                yield message
        finally:
            call.cancel()

    def _begin(self, method: Callable[..., Any], given: Any) -> Any:
        try:
            return method(given, timeout=max(0.001, self._deadline_s - time.monotonic()))
        except ValueError:
            # The channel was closed.
            raise CallEndedError from None

    def _watched(self, messages: Iterable[Any]) -> Iterator[Any]:
        for message in messages:
            yield message
            self.moved_s = time.monotonic()


class KVPeer:
    """gRPC channel to one node; thread-safe.

    After a failed call the node is down and calls are refused; a thread probes it with exponential backoff until it
    answers. A restarted node may have another address, which ``find`` looks up before each probe. A changed instance
    counts as a failure, as the blocks are lost.

    Args:
        address: ``host:port``.
        fingerprint: sent with probes.
        deadline_s: of every call.
        backoff: pauses between probes.
        find: looks up the node's current address, on a separate thread and never concurrently; if it raises, the last
            address is used.
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
        self.address, self.deadline_s = address, deadline_s
        self._fingerprint, self._backoff, self._find, self._tls = fingerprint, backoff, find, tls
        self._finder = ThreadPoolExecutor(1, "kv node")
        self._looking: Future[str] | None = None
        self._instance: str | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._up, self._reason, self._failures = True, "", 0
        self._counts: Counter[str] = Counter()
        self._connect(address)

    def ready(self) -> bool:
        with self._lock:
            return self._up

    def state(self) -> tuple[bool, str, Counter[str]]:
        """Whether the node is up, the reason if not, and the numbers of ``failures``, ``refused`` and ``late`` calls.
        ``failures`` includes changed instances, which ``restarts`` counts separately."""
        with self._lock:
            return self._up, self._reason, self._counts.copy()

    def call(self, method: str, request: Any) -> Any:
        """Reply to one request, or None on failure."""
        if self.ready():
            with self.recorded() as transfer:
                return transfer.ask(method, request)
        return None

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Transfer]:
        """Context of a call that records its result and suppresses :data:`CALL_ERRORS`. The node then counts as down,
        unless it refused, or messages still moved in the second half of the deadline, as in a large transfer or with a
        slow consumer."""
        transfer = Transfer(self)
        try:
            yield transfer
        except CALL_ERRORS as error:
            code = error.code() if isinstance(error, grpc.RpcError) else None
            waited_s = time.monotonic() - transfer.moved_s
            with self._lock:
                if code is grpc.StatusCode.DEADLINE_EXCEEDED and waited_s < self.deadline_s / 2:
                    self._counts["late"] += 1
                elif code in _REFUSED:
                    self._counts["refused"] += 1
                else:
                    self._fail(error)
        else:
            with self._lock:
                self._failures = 0

    def check_instance(self, call: Any) -> None:
        """Compare the answering instance with the last one; a change counts as a failure."""
        found = dict(call.initial_metadata()).get(INSTANCE)
        with self._lock:
            if found is not None and found != self._instance:
                if self._instance is not None:
                    self._counts["failures"] += 1
                    self._counts["restarts"] += 1
                self._instance = found

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._up, self._reason = False, f"the connection to {self.address} was closed"
            self._channel.close()
        self._finder.shutdown(wait=False, cancel_futures=True)

    def _fail(self, error: Exception) -> None:
        self._counts["failures"] += 1
        if self._up:
            self._failures += 1
            # Without room for a thread, the next call tries the node.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._recover, name=f"kv {self.address}", daemon=True).start()
                self._up, self._reason = False, self._why(error)

    def _why(self, error: Exception) -> str:
        if isinstance(error, grpc.RpcError) and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the tier at {self.address} failed: {to_error(error)}"
        return f"the tier at {self.address} did not answer within {self.deadline_s:g} s"

    def _recover(self) -> None:
        usage = kv_pb2.UsageRequest(fingerprint=self._fingerprint)
        while not self._closed.wait(self._backoff.delay_s(self._failures - 1, random.random())):
            reason = ""
            try:
                self._reconnect(self._found())
                Transfer(self).ask("Usage", usage)
            except Exception as error:
                reason = self._why(error)
            with self._lock:
                if not self._closed.is_set():
                    self._up, self._reason = not reason, reason
                if not reason:
                    return
                self._failures += 1

    def _connect(self, address: str) -> None:
        renewals = 0 if self._tls is None else self._tls.renewals()
        self._channel = open_blocking_channel(address, tls=self._tls)
        self.stub: Any = kv_pb2_grpc.KVStub(self._channel)
        self.address, self._renewals = address, renewals

    def _found(self) -> str:
        """Look up the node's address; the last one if the lookup fails or exceeds the deadline."""
        if self._find is None:
            return self.address
        looked = self._looking = self._looking or self._finder.submit(self._find)
        wait([looked], self.deadline_s)
        if not looked.done():
            return self.address
        self._looking = None
        try:
            address = looked.result()
            split_address(address)
        except Exception as error:
            log.info("cannot look up the tier last at %s: %s", self.address, error)
            return self.address
        return address

    def _reconnect(self, address: str) -> None:
        """Open a new channel if the address or the certificate changed."""
        with self._lock:
            renewed = self._tls is not None and self._tls.renewals() != self._renewals
            if not self._closed.is_set() and (address != self.address or renewed):
                old = self._channel
                self._connect(address)
                old.close()
