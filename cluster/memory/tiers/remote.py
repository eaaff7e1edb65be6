"""Tier on another node, over gRPC."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Self

from sightline.v1 import kv_pb2

from cluster.codec.supervisor import Backoff
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier, TierSettings, TierState
from cluster.memory.tiers.codec import Codec
from cluster.memory.tiers.kv_wire import (
    BATCH_BYTES,
    MAX_KV_BYTES,
    MAX_MANIFEST_BYTES,
    batches,
    key_to_proto,
    outcome_from_proto,
)
from cluster.memory.tiers.remote_peer import KVPeer
from cluster.wire.channel import split_address
from cluster.wire.tls import PeerTls

# Overhead of a key in a message, in addition to its encoded size.
_LENGTH_BYTES = 4


class RemoteTier(Tier):
    """Client of the tier that ``KVServicer`` serves at ``address``.

    After a failure or timeout the tier is down: every call returns ``RETRY`` at once, while a background thread probes
    the node with exponential backoff. A node that returns may be empty, and ``failures`` has then increased.

    Args:
        address: ``host:port``.
        fingerprint: model and settings of the blocks; others are misses.
        cap_bytes: of each stream, which :meth:`set_cap` can only lower, also on the node; default: unbounded.
        secret: key of the digests, shared with the node; see :mod:`cluster.memory.tiers.codec`.
        deadline_s: of one call, network included.
        backoff: pauses between probes of a node that is down.
        find: looks up the node's address; see ``KVPeer``.
        tls: of this cluster's processes.

    Raises:
        ConfigError: an invalid address or fingerprint.
    """

    def __init__(
        self,
        address: str,
        *,
        fingerprint: str,
        cap_bytes: int = sys.maxsize,
        secret: bytes = b"",
        deadline_s: float = 2.0,
        backoff: Backoff | None = None,
        find: Callable[[], str] | None = None,
        name: str = "remote",
        tls: PeerTls | None = None,
    ) -> None:
        split_address(address)
        super().__init__(name, cap_bytes)
        self._fingerprint, self._codec = fingerprint, Codec(fingerprint, secret)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        pauses = backoff or Backoff(first_s=0.5, longest_s=5.0)
        self.peer = KVPeer(address, fingerprint=fingerprint, deadline_s=deadline_s, backoff=pauses, find=find, tls=tls)

    @classmethod
    def from_settings(cls, settings: TierSettings) -> Self | None:
        if settings.node_address is None:
            return None
        return cls(
            settings.node_address,
            cap_bytes=settings.camera_bytes or settings.node_bytes,
            find=settings.find_node,
            name="node",
            tls=settings.tls,
            **settings.storage,
        )

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        """See ``Tier``. Encodes batches while earlier ones are in flight; ``RETRY`` for those past the deadline."""
        outcomes: dict[int, Outcome] = {}
        sent: list[int] = []
        failures: list[Exception] = []
        # Leaves time for the node's reply.
        stop = time.monotonic() + self._deadline_s * 3 / 4

        def encoded() -> Iterator[kv_pb2.StoredBlock]:
            for at, (key, block) in enumerate(items):
                if time.monotonic() > stop:
                    return
                try:
                    data = self._codec.encode(key, block)
                except Exception as error:
                    # Raised later: this runs on gRPC's thread.
                    failures.append(error)
                    return
                if len(data) > MAX_KV_BYTES:
                    self._count(too_large=1)
                    outcomes[at] = Outcome.MISS
                    continue
                sent.append(at)
                yield kv_pb2.StoredBlock(key=key_to_proto(key), data=data, cap_bytes=self._caps.get(key.stream, 0))

        if items and self.peer.ready():
            with self.peer.recorded() as transfer:
                reply = transfer.send("Store", self._stores(encoded()))
                outcomes.update(zip(sent, map(outcome_from_proto, reply.outcomes), strict=False))
        if failures:
            raise failures[0]
        results = [outcomes.get(at, Outcome.RETRY) for at in range(len(items))]
        self._count(stored=results.count(Outcome.HIT), retries=results.count(Outcome.RETRY))
        return results

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        return list(self.iter_loaded(keys))

    def iter_loaded(self, keys: Sequence[BlockKey]) -> Iterator[Loaded]:
        """Yield blocks in the order of ``keys`` as they arrive, so that the first layer is usable while the second is
        in flight. The consumer's time counts towards the deadline."""
        given = 0
        if keys and self.peer.ready():
            request = kv_pb2.LoadRequest(fingerprint=self._fingerprint, keys=map(key_to_proto, keys))
            with self.peer.recorded() as transfer:
                for message in transfer.receive("Load", request):
                    for answer in message.blocks[: len(keys) - given]:
                        given += 1
                        yield self._opened(keys[given - 1], answer)
        for outcome in self._not_now(len(keys) - given):
            yield Loaded(outcome)

    def list_blocks(self, stream: str) -> tuple[Outcome, list[BlockKey]]:
        if self.peer.ready():
            request = kv_pb2.ListRequest(fingerprint=self._fingerprint, stream=stream)
            found: list[BlockKey] = []
            with self.peer.recorded() as transfer:
                for message in transfer.receive("List", request):
                    found += [BlockKey(stream, key.layer, key.head, key.block) for key in message.keys]
                return Outcome.HIT, found
        return self._not_now(1)[0], []

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        """See ``Tier``. A failed drop is counted as a retry."""
        stored = partial(kv_pb2.DropRequest, fingerprint=self._fingerprint, stream=stream)
        of_keys = batches(map(key_to_proto, keys or ()), lambda key: key.ByteSize() + _LENGTH_BYTES)
        dropped = 0
        for request in [stored(all=True)] if keys is None else (stored(keys=batch) for batch in of_keys):
            reply = self.peer.call("Drop", request)
            if reply is None:
                self._count(retries=1)
            if reply is None or not reply.done:
                return None
            dropped += int(reply.dropped)
        return dropped

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """See ``Tier``. Sends the manifest in pieces; the previous one stays until the node has all of them. ``MISS``
        above the stream's cap or :data:`MAX_MANIFEST_BYTES`."""
        data = self._codec.encode_manifest(stream, manifest)
        if len(data) > min(self.cap(stream), MAX_MANIFEST_BYTES):
            self._count(too_large=1)
            return Outcome.MISS

        def pieces() -> Iterator[kv_pb2.PutManifestRequest]:
            yield kv_pb2.PutManifestRequest(
                fingerprint=self._fingerprint,
                stream=stream,
                bytes=len(data),
                cap_bytes=self._caps.get(stream, 0),
                piece=data[:BATCH_BYTES],
            )
            for at in range(BATCH_BYTES, len(data), BATCH_BYTES):
                yield kv_pb2.PutManifestRequest(piece=data[at : at + BATCH_BYTES])

        if self.peer.ready():
            with self.peer.recorded() as transfer:
                reply = transfer.send("PutManifest", pieces())
                self._count(bytes_out=len(data))
                return outcome_from_proto(reply.outcome)
        return self._not_now(1)[0]

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        if not self.peer.ready():
            return self._not_now(1)[0], None
        request = kv_pb2.GetManifestRequest(fingerprint=self._fingerprint, stream=stream)
        data = bytearray()
        outcome = first = Outcome.RETRY
        with self.peer.recorded() as transfer:
            for number, message in enumerate(transfer.receive("GetManifest", request)):
                first = outcome_from_proto(message.outcome) if number == 0 else first
                data += message.piece
                if len(data) > MAX_MANIFEST_BYTES:
                    break
            outcome = first
        if outcome is not Outcome.HIT:
            self._count(retries=outcome is Outcome.RETRY)
            return outcome, None
        self._count(bytes_in=len(data))
        found = self._codec.decode_manifest(stream, bytes(data))
        if isinstance(found, bytes):
            return Outcome.HIT, found
        self._count(**{found.value: 1})
        return Outcome.MISS, None

    def nbytes(self, stream: str | None = None) -> int:
        """See ``Tier``; 0 while the node is down."""
        reply = self.peer.call("Usage", kv_pb2.UsageRequest(fingerprint=self._fingerprint, stream=stream or ""))
        return 0 if reply is None else int(reply.bytes)

    def state(self) -> TierState:
        """See ``Tier``. Additional counts: ``failures``, ``refused`` and ``late`` calls, ``restarts`` of the node,
        ``foreign`` and ``too_large`` blocks and manifests."""
        up, reason, counts = self.peer.state()
        with self._lock:
            return TierState(up, reason, dict(self._counts + counts))

    def close(self) -> None:
        self.peer.close()

    def _stores(self, blocks: Iterator[kv_pb2.StoredBlock]) -> Iterator[kv_pb2.StoreRequest]:
        for batch in batches(blocks, lambda block: len(block.data)):
            yield kv_pb2.StoreRequest(fingerprint=self._fingerprint, blocks=batch)
            self._count(bytes_out=sum(len(block.data) for block in batch))

    def _opened(self, key: BlockKey, answer: kv_pb2.LoadedBlock) -> Loaded:
        outcome = outcome_from_proto(answer.outcome)
        if outcome is Outcome.HIT:
            found = self._codec.decode(key, answer.data)
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
