"""A tier on another node: blocks go there and come back by gRPC."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc.aio
from sightline.v1 import kv_pb2

from cluster.codec.supervisor import Backoff
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier, TierState
from cluster.memory.tiers.codec import check_storage, encode_block, open_block
from cluster.rpc.calls import CallEndedError, write
from cluster.rpc.channel import split_address
from cluster.rpc.kv_peer import TROUBLE, KVPeer, OutOfTimeError
from cluster.rpc.kv_wire import MAX_KV_BYTES, batches, key_to_proto, outcome_from_proto
from cluster.rpc.tls import PeerTls


class RemoteTier(Tier):
    """The tier that ``KVServicer`` serves at ``address``.

    When a call fails or does not end within ``deadline_s``, the tier is down: from then on everything is answered at
    once with ``RETRY``, and only a call of the tier's own, after a growing pause, asks whether the node is back.

    Args:
        address: ``host:port``.
        fingerprint: model and settings of the blocks; those of another one are misses.
        store_as: form in which blocks travel from here; see ``encode_block``.
        deadline_s: longest that one call may take, waiting for the network included.
        backoff: pauses between attempts to reach a node that is down.
        tls: of this cluster's processes.

    Raises:
        ConfigError: not an address, or a fingerprint or form under which nothing can be stored.
    """

    def __init__(
        self,
        address: str,
        *,
        fingerprint: str,
        store_as: str = "plain",
        deadline_s: float = 2.0,
        backoff: Backoff | None = None,
        name: str = "remote",
        tls: PeerTls | None = None,
    ) -> None:
        split_address(address)
        check_storage(fingerprint, store_as)
        self.name, self.address = name, address
        self._fingerprint, self._store_as, self._deadline_s = fingerprint, store_as, deadline_s
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        pauses = backoff or Backoff(first_s=0.5, longest_s=30.0)
        self._peer = KVPeer(address, fingerprint=fingerprint, deadline_s=deadline_s, backoff=pauses, tls=tls)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """See ``Tier``."""
        request = kv_pb2.LookupRequest(fingerprint=self._fingerprint, keys=map(key_to_proto, keys))
        reply = self._peer.ask(self._peer.stub.Lookup, request) if keys else None
        if reply is None or len(reply.outcomes) != len(keys):
            return self._not_now(len(keys))
        return [outcome_from_proto(number) for number in reply.outcomes]

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        """See ``Tier``. Blocks are encoded batch by batch, while the ones before travel; ``RETRY`` for those that the
        deadline leaves no time for."""
        outcomes: dict[int, Outcome] = {}
        sent: list[int] = []
        until = time.monotonic() + self._deadline_s
        # The rest of the time is for the node to answer for what it got.
        stop = until - self._deadline_s / 4

        def encoded() -> Iterator[kv_pb2.StoredBlock]:
            for at, (key, block) in enumerate(items):
                if time.monotonic() > stop:
                    return
                data = encode_block(key, block, fingerprint=self._fingerprint, store_as=self._store_as)
                if len(data) > MAX_KV_BYTES:
                    self._count(too_large=1)
                    outcomes[at] = Outcome.MISS
                    continue
                sent.append(at)
                yield kv_pb2.StoredBlock(key=key_to_proto(key), data=data)

        if items and self._peer.ready():
            try:
                reply = self._send(encoded(), until)
            except TROUBLE as error:
                self._peer.failed(error)
            else:
                self._peer.worked()
                outcomes.update(zip(sent, map(outcome_from_proto, reply.outcomes), strict=False))
        told = [outcomes.get(at, Outcome.RETRY) for at in range(len(items))]
        self._count(stored=told.count(Outcome.HIT), retries=told.count(Outcome.RETRY))
        return told

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        """See ``Tier``."""
        return list(self.load_each(keys))

    def load_each(self, keys: Sequence[BlockKey]) -> Iterator[Loaded]:
        """The blocks in the order of ``keys``, each as soon as it is there: ask for a layer's blocks after another's,
        and the first can be used while the second travels. What is done in between counts towards the deadline."""
        given = 0
        if keys and self._peer.ready():
            until = time.monotonic() + self._deadline_s
            request = kv_pb2.LoadRequest(fingerprint=self._fingerprint, keys=map(key_to_proto, keys))
            try:
                for message in self._receive(self._peer.stub.Load, request, until):
                    for answer in message.blocks[: len(keys) - given]:
                        given += 1
                        yield self._opened(keys[given - 1], answer)
            except TROUBLE as error:
                self._peer.failed(error)
            else:
                self._peer.worked()
        for outcome in self._not_now(len(keys) - given):
            yield Loaded(outcome)

    def list_blocks(self, stream: str) -> tuple[Outcome, list[BlockKey]]:
        """See ``Tier``."""
        if not self._peer.ready():
            return self._not_now(1)[0], []
        request = kv_pb2.ListRequest(fingerprint=self._fingerprint, stream=stream)
        until, found = time.monotonic() + self._deadline_s, list[BlockKey]()
        try:
            for message in self._receive(self._peer.stub.List, request, until):
                found += [BlockKey(stream, key.layer, key.head, key.block) for key in message.keys]
        except TROUBLE as error:
            self._peer.failed(error)
            return self._not_now(1)[0], []
        self._peer.worked()
        return Outcome.HIT, found

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        """See ``Tier``. A drop that could not be done is counted as a retry."""
        request = kv_pb2.DropRequest(
            fingerprint=self._fingerprint, stream=stream, all=keys is None, keys=map(key_to_proto, keys or ())
        )
        reply = self._peer.ask(self._peer.stub.Drop, request)
        if reply is None:
            self._count(retries=1)
            return None
        if not reply.done:
            return None
        return int(reply.dropped)

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """See ``Tier``. ``MISS`` for one too large for a message."""
        if len(manifest) > MAX_KV_BYTES:
            self._count(too_large=1)
            return Outcome.MISS
        request = kv_pb2.PutManifestRequest(fingerprint=self._fingerprint, stream=stream, manifest=manifest)
        reply = self._peer.ask(self._peer.stub.PutManifest, request)
        return self._not_now(1)[0] if reply is None else outcome_from_proto(reply.outcome)

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        """See ``Tier``."""
        request = kv_pb2.GetManifestRequest(fingerprint=self._fingerprint, stream=stream)
        reply = self._peer.ask(self._peer.stub.GetManifest, request)
        if reply is None:
            return self._not_now(1)[0], None
        outcome = outcome_from_proto(reply.outcome)
        return outcome, reply.manifest if outcome is Outcome.HIT else None

    def nbytes(self, stream: str | None = None) -> int:
        """See ``Tier``; 0 while the node cannot be asked."""
        reply = self._peer.ask(
            self._peer.stub.Usage, kv_pb2.UsageRequest(fingerprint=self._fingerprint, stream=stream or "")
        )
        return 0 if reply is None else int(reply.bytes)

    def state(self) -> TierState:
        """See ``Tier``. Besides the usual counts: ``failures``, ``refused`` and ``late`` calls, ``foreign`` and
        ``too_large`` blocks."""
        up, reason, counts = self._peer.state()
        with self._lock:
            return TierState(up, reason, dict(self._counts + counts))

    def close(self) -> None:
        """See ``Tier``. Blocks stay where they are."""
        self._peer.close()

    def _send(self, blocks: Iterator[kv_pb2.StoredBlock], until: float) -> Any:
        call = self._peer.run(_start(lambda left: self._peer.stub.Store(timeout=left), until), until)
        try:
            with contextlib.suppress(CallEndedError):
                for batch in batches(blocks, lambda block: len(block.data)):
                    request = kv_pb2.StoreRequest(fingerprint=self._fingerprint, blocks=batch)
                    self._peer.run(write(call, request), until)
                    self._count(bytes_out=sum(len(block.data) for block in batch))
            return self._peer.run(_reply(call), until)
        finally:
            self._peer.end(call)

    def _receive(self, method: Callable[..., Any], request: Any, until: float) -> Iterator[Any]:
        call = self._peer.run(_start(lambda left: method(request, timeout=left), until), until)
        try:
            while (message := self._next(call, until)) is not grpc.aio.EOF:
                yield message
        finally:
            self._peer.end(call)

    def _next(self, call: Any, until: float) -> Any:
        """The next message. A deadline that passes soon after the last one says that much was asked for, or that the
        caller took its time, and not that the node is down."""
        began = time.monotonic()
        try:
            return self._peer.run(call.read(), until)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            late = isinstance(error, TimeoutError) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if late and time.monotonic() - began < self._deadline_s / 2:
                raise OutOfTimeError from None
            raise

    def _opened(self, key: BlockKey, answer: kv_pb2.LoadedBlock) -> Loaded:
        outcome = outcome_from_proto(answer.outcome)
        if outcome is Outcome.HIT:
            found = open_block(answer.data, key, fingerprint=self._fingerprint)
            self._count(bytes_in=len(answer.data))
            if isinstance(found, Block):
                self._count(hits=1)
                return Loaded(Outcome.HIT, found)
            self._count(**{found.value: 1})
            outcome = Outcome.MISS
        self._count(misses=outcome is Outcome.MISS, retries=outcome is Outcome.RETRY)
        return Loaded(outcome)

    def _not_now(self, blocks: int) -> list[Outcome]:
        self._count(retries=blocks)
        return [Outcome.RETRY] * blocks

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update({what: number for what, number in more.items() if number})


async def _start(call: Callable[[float], Any], until: float) -> Any:
    return call(max(0.001, until - time.monotonic()))


async def _reply(call: Any) -> Any:
    """What the server says to all that was written, or its status."""
    with contextlib.suppress(grpc.aio.InternalError):
        await call.done_writing()
    return await call
