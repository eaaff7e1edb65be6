"""``KV`` service: serves this node's tier to replicas."""

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc.aio
from sightline.v1 import kv_pb2, kv_pb2_grpc

from cluster import metrics
from cluster.errors import CapacityError, UnavailableError
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier
from cluster.memory.tiers.codec import BlockFault, Codec
from cluster.memory.tiers.kv_wire import (
    BATCH_BYTES,
    INSTANCE,
    MAX_KV_BYTES,
    MAX_KV_MESSAGE_BYTES,
    MAX_MANIFEST_BYTES,
    batches,
    key_from_proto,
    message_runs,
    outcome_from_proto,
    outcome_to_proto,
)
from cluster.memory.tiers.metrics import NodeTierCall, NodeTierResult
from cluster.wire.status import code_of

T = TypeVar("T")
Context: TypeAlias = grpc.aio.ServicerContext

_RUN = 64
_LISTED = 65_536

_RESULTS: dict[grpc.StatusCode, NodeTierResult] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.DEADLINE_EXCEEDED: "late",
}

_NEARLY_S = 0.1
"""A caller that disconnects with at most this much of its deadline left counts as answered late: its clock started
before this side's."""


class KVServicer(kv_pb2_grpc.KVServicer):
    """Serves ``tier``, whose calls run on a thread pool.

    Args:
        tier: any tier; closed by the caller.
        fingerprint: model and settings of its blocks; callers with another one get misses. ``ConfigError`` if invalid.
        secret: key of the digests, shared with callers; blocks that do not match are rejected.
        threads: maximum number of concurrent tier calls.
        waiting: maximum number of queued calls; further ones are refused with ``CapacityError``.
        deadline_s: maximum duration of a call, whatever its caller allows.

    ``counts``: ``foreign``, ``damaged`` and ``too_large`` blocks and manifests, ``too_large`` messages, and ``refused``
    calls. ``instance`` is unique per servicer: a change tells callers that stored blocks are lost.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        fingerprint: str,
        secret: bytes = b"",
        threads: int = 4,
        waiting: int = 64,
        deadline_s: float = 30.0,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.instance = uuid.uuid4().hex
        self._tier, self._fingerprint, self._codec = tier, fingerprint, Codec(fingerprint, secret)
        self._deadline_s, self._most = deadline_s, threads + waiting
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kv")
        self._lock = threading.Lock()
        self._under_way = self._moving = 0

    def close(self) -> None:
        """Accept no more calls; running ones complete."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def wire_counts(self) -> dict[str, int]:
        """Snapshot of ``counts``; callable from any thread."""
        with self._lock:
            return dict(self.counts)

    async def Store(self, request_iterator: AsyncIterable[kv_pb2.StoreRequest], context: Context) -> kv_pb2.StoreReply:
        reply = kv_pb2.StoreReply()
        async with self._answering("store", None, context) as call:
            async for request in request_iterator:
                self._check_size(request)
                outcomes = await self._on_tier(partial(self._store, request))
                metrics.node_tier_moved_bytes.labels("in").inc(sum(len(stored.data) for stored in request.blocks))
                call.record_outcomes(outcomes)
                reply.outcomes.extend(map(outcome_to_proto, outcomes))
        return reply

    async def Load(self, request: kv_pb2.LoadRequest, context: Context) -> None:
        async with self._answering("load", request, context) as call:
            keys = [key_from_proto(key) for key in request.keys]
            if not self._is_ours(request.fingerprint, len(keys)):
                miss = kv_pb2.LoadedBlock(outcome=kv_pb2.KV_OUTCOME_MISS)
                call.record_outcomes([Outcome.MISS] * len(keys))
                await context.write(kv_pb2.LoadReply(blocks=[miss] * len(keys)))
                return
            for run in message_runs(keys, _RUN):
                for reply in await self._on_tier(partial(self._load, run)):
                    call.record_outcomes(outcome_from_proto(block.outcome) for block in reply.blocks)
                    metrics.node_tier_moved_bytes.labels("out").inc(sum(len(block.data) for block in reply.blocks))
                    await context.write(reply)

    async def Drop(self, request: kv_pb2.DropRequest, context: Context) -> kv_pb2.DropReply:
        async with self._answering("drop", request, context):
            keys = None if request.all else [key_from_proto(key) for key in request.keys]
            dropped: int | None = 0
            if self._is_ours(request.fingerprint, 0):
                dropped = await self._on_tier(lambda: self._tier.drop(request.stream, keys))
                if keys is None:
                    # Sent again with whatever the stream stores next.
                    await self._on_tier(lambda: self._tier.set_cap(request.stream, None))
            return kv_pb2.DropReply(dropped=dropped or 0, done=dropped is not None)

    async def List(self, request: kv_pb2.ListRequest, context: Context) -> None:
        async with self._answering("list", request, context):
            if not self._is_ours(request.fingerprint, 0):
                return
            outcome, keys = await self._on_tier(lambda: self._tier.list_blocks(request.stream))
            if outcome is not Outcome.HIT:
                raise UnavailableError("the tier cannot list its blocks now; try again later")
            for at in range(0, len(keys), _LISTED):
                part = [
                    kv_pb2.KVKey(layer=key.layer, head=key.head, block=key.block) for key in keys[at : at + _LISTED]
                ]
                await context.write(kv_pb2.ListReply(keys=part))

    async def PutManifest(
        self, request_iterator: AsyncIterable[kv_pb2.PutManifestRequest], context: Context
    ) -> kv_pb2.PutManifestReply:
        async with self._answering("put_manifest", None, context):
            outcome = Outcome.MISS
            requests = aiter(request_iterator)
            first = await anext(requests, kv_pb2.PutManifestRequest())
            if self._is_ours(first.fingerprint, 1):
                with self._in_transit(first.bytes):
                    whole = await self._pieces(first, requests)
                    metrics.node_tier_moved_bytes.labels("in").inc(len(whole))
                    outcome = await self._on_tier(lambda: self._put_manifest(first, whole))
            return kv_pb2.PutManifestReply(outcome=outcome_to_proto(outcome))

    async def GetManifest(self, request: kv_pb2.GetManifestRequest, context: Context) -> None:
        async with self._answering("get_manifest", request, context):
            outcome, manifest = Outcome.MISS, None
            if self._is_ours(request.fingerprint, 1):
                outcome, manifest = await self._on_tier(lambda: self._tier.manifest(request.stream))
            whole = manifest or b""
            with self._in_transit(len(whole)):
                metrics.node_tier_moved_bytes.labels("out").inc(len(whole))
                reply = kv_pb2.GetManifestReply(outcome=outcome_to_proto(outcome), piece=whole[:BATCH_BYTES])
                await context.write(reply)
                for at in range(BATCH_BYTES, len(whole), BATCH_BYTES):
                    await context.write(kv_pb2.GetManifestReply(piece=whole[at : at + BATCH_BYTES]))

    async def Usage(self, request: kv_pb2.UsageRequest, context: Context) -> kv_pb2.UsageReply:
        async with self._answering("usage", request, context):
            held = 0
            if self._is_ours(request.fingerprint, 0):
                held = await self._on_tier(lambda: self._tier.nbytes(request.stream or None))
            return kv_pb2.UsageReply(bytes=held)

    @asynccontextmanager
    async def _answering(self, method: str, request: Any, context: Context) -> AsyncIterator[NodeTierCall]:
        """Context of a call: enforces the deadline and records the result, before the caller reads the status, which
        may take arbitrarily long."""
        call = NodeTierCall(method)
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                await context.send_initial_metadata(((INSTANCE, self.instance),))
                if request is not None:
                    self._check_size(request)
                yield call
        except asyncio.CancelledError:
            left_s = context.time_remaining()
            call.record_result("left" if left_s is None or left_s > _NEARLY_S else "late")
            raise
        except TimeoutError as error:
            call.record_result("late")
            late = TimeoutError(f"the tier did not answer within {self._deadline_s:g} s")
            raise (late if limit.expired() else error) from None
        except Exception as error:
            # Raised when the caller has disconnected.
            left = isinstance(error, grpc.aio.InternalError)
            call.record_result("left" if left else _RESULTS.get(code_of(error), "failed"))
            raise
        else:
            call.record_result("ok")

    @contextmanager
    def _in_transit(self, nbytes: int) -> Iterator[None]:
        """Reserve memory for a manifest in transit; all of them together are limited to :data:`MAX_MANIFEST_BYTES`."""
        if nbytes > MAX_MANIFEST_BYTES:
            self._count("too_large", 1)
            raise CapacityError(
                f"a manifest of {nbytes} bytes is too large; this node takes up to {MAX_MANIFEST_BYTES}"
            )
        with self._lock:
            if self._moving + nbytes > MAX_MANIFEST_BYTES:
                self.counts["refused"] += 1
                raise CapacityError(f"manifests of {self._moving} bytes are in flight already; try again later")
            self._moving += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._moving -= nbytes

    async def _pieces(
        self, first: kv_pb2.PutManifestRequest, following: AsyncIterator[kv_pb2.PutManifestRequest]
    ) -> bytes:
        """Receive a whole manifest, of exactly the length announced by its first message."""
        self._check_size(first)
        whole = bytearray(first.piece)
        async for request in following:
            self._check_size(request)
            whole += request.piece
            if len(whole) > first.bytes:
                break
        if len(whole) != first.bytes:
            raise ValueError(f"expected a manifest of {first.bytes} bytes, received {len(whole)} or more")
        return bytes(whole)

    def _put_manifest(self, first: kv_pb2.PutManifestRequest, whole: bytes) -> Outcome:
        """Store a manifest as received. ``RETRY`` if damaged in transit, ``MISS`` if foreign."""
        found = self._codec.decode_manifest(first.stream, whole)
        if isinstance(found, BlockFault):
            self._count(found.value, 1)
            return Outcome.MISS if found is BlockFault.FOREIGN else Outcome.RETRY
        self._set_cap(first.stream, first.cap_bytes)
        return self._tier.put_manifest(first.stream, whole)

    def _set_cap(self, stream: str, cap_bytes: int) -> None:
        if cap_bytes:
            self._tier.set_cap(stream, cap_bytes)

    def _check_size(self, request: Any) -> None:
        if request.ByteSize() > MAX_KV_MESSAGE_BYTES:
            self._count("too_large", 1)
            raise CapacityError(
                f"a message of {request.ByteSize()} bytes is too large; this node takes up to {MAX_KV_MESSAGE_BYTES}"
            )

    def _is_ours(self, fingerprint: str, blocks: int) -> bool:
        if fingerprint == self._fingerprint:
            return True
        self._count("foreign", blocks)
        return False

    async def _on_tier(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread. Calls count until the tier returns, even if abandoned, which bounds the number that
        a stalled tier accumulates."""
        with self._lock:
            if self._under_way >= self._most:
                self.counts["refused"] += 1
                raise CapacityError(f"{self._most} calls are running or queued on this node's tier; try again later")
            # Before it counts: there may be no room for a thread.
            future = self._threads.submit(work)
            self._under_way += 1
        future.add_done_callback(self._release)
        waiting: Awaitable[T] = asyncio.wrap_future(future)
        return await waiting

    def _count(self, what: str, number: int) -> None:
        with self._lock:
            self.counts[what] += number

    def _release(self, _future: Future[T]) -> None:
        with self._lock:
            self._under_way -= 1

    def _store(self, request: kv_pb2.StoreRequest) -> list[Outcome]:
        """Store the intact blocks of one message: ``RETRY`` for damaged ones, ``MISS`` for foreign ones."""
        outcomes = []
        good: list[tuple[int, BlockKey, Block]] = []
        caps: dict[str, int] = {}
        for at, stored in enumerate(request.blocks):
            key = key_from_proto(stored.key)
            found = self._codec.decode(key, stored.data)
            if isinstance(found, Block):
                good.append((at, key, found))
                caps[key.stream] = stored.cap_bytes
            else:
                self._count(found.value, 1)
            outcomes.append(Outcome.MISS if found is BlockFault.FOREIGN else Outcome.RETRY)
        for stream, cap_bytes in caps.items():
            self._set_cap(stream, cap_bytes)
        held = self._tier.store([(key, block) for _, key, block in good])
        for (at, _, _), outcome in zip(good, held, strict=True):
            outcomes[at] = outcome
        return outcomes

    def _load(self, keys: Sequence[BlockKey]) -> list[kv_pb2.LoadReply]:
        blocks = (self._outgoing(key, one) for key, one in zip(keys, self._tier.load(keys), strict=True))
        return [kv_pb2.LoadReply(blocks=batch) for batch in batches(blocks, lambda block: len(block.data))]

    def _outgoing(self, key: BlockKey, loaded: Loaded) -> kv_pb2.LoadedBlock:
        if loaded.block is None:
            return kv_pb2.LoadedBlock(outcome=outcome_to_proto(loaded.outcome))
        data = self._codec.encode(key, loaded.block)
        if len(data) > MAX_KV_BYTES:
            self._count("too_large", 1)
            return kv_pb2.LoadedBlock(outcome=kv_pb2.KV_OUTCOME_MISS)
        return kv_pb2.LoadedBlock(outcome=kv_pb2.KV_OUTCOME_HIT, data=data)
