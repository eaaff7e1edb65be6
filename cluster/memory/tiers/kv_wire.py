"""Wire format of the ``KV`` service: size limits, protobuf conversions, and batching into bounded messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from sightline.v1 import kv_pb2

from cluster.memory.tiers.base import BlockKey, Outcome

T = TypeVar("T")

MAX_KV_MESSAGE_BYTES = 16 * 2**20
"""Maximum message size; larger messages are refused, and blocks that would need one are not sent."""

MAX_KV_BYTES = MAX_KV_MESSAGE_BYTES - 2**16
"""Maximum block size: a block, its key and the fingerprint fit into one message."""

BATCH_BYTES = 2**20
"""Size at which a message is sent, so that its first block does not wait long for its last; also the size of a
manifest's pieces."""

MAX_MANIFEST_BYTES = 256 * 2**20
"""Maximum size of a sealed manifest, and of all manifests in flight at a node."""

INSTANCE = "sightline-instance"
"""Initial-metadata key of the servicer's instance id; blocks stored under another id are lost."""

_TO_PROTO = {
    Outcome.HIT: kv_pb2.KV_OUTCOME_HIT,
    Outcome.MISS: kv_pb2.KV_OUTCOME_MISS,
    Outcome.RETRY: kv_pb2.KV_OUTCOME_RETRY,
}
_FROM_PROTO: dict[int, Outcome] = {number: outcome for outcome, number in _TO_PROTO.items()}


def key_to_proto(key: BlockKey) -> kv_pb2.KVKey:
    """Convert a key to protobuf."""
    return kv_pb2.KVKey(stream=key.stream, layer=key.layer, head=key.head, block=key.block)


def key_from_proto(message: kv_pb2.KVKey) -> BlockKey:
    """Convert a key from protobuf."""
    return BlockKey(message.stream, message.layer, message.head, message.block)


def outcome_to_proto(outcome: Outcome) -> kv_pb2.KVOutcome:
    """Convert an outcome to its protobuf number."""
    return _TO_PROTO[outcome]


def outcome_from_proto(number: int) -> Outcome:
    """Convert an outcome from its protobuf number; ``RETRY`` for unknown ones, of newer peers."""
    return _FROM_PROTO.get(number, Outcome.RETRY)


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Batch ``items`` in order, to about :data:`BATCH_BYTES` and at most :data:`MAX_KV_BYTES`; the caller must refuse
    larger items."""
    batch: list[T] = []
    held = 0
    for item in items:
        if batch and (held >= BATCH_BYTES or held + size(item) > MAX_KV_BYTES):
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size(item)
    if batch:
        yield batch


def message_runs(keys: Sequence[BlockKey], most: int) -> Iterator[Sequence[BlockKey]]:
    """Split ``keys``, in order, where the layer changes and after ``most``."""
    start = 0
    for end in range(1, len(keys) + 1):
        if end == len(keys) or keys[end].layer != keys[start].layer or end - start == most:
            yield keys[start:end]
            start = end
