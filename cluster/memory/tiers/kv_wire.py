"""Protobuf conversion of KV keys and outcomes, and batching into bounded messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from sightline.v1 import kv_pb2

from cluster.memory.tiers.base import BlockKey, Outcome

T = TypeVar("T")

MAX_KV_MESSAGE_BYTES = 16 * 2**20
"""A longer message is refused; no block is sent that would need one."""

MAX_KV_BYTES = MAX_KV_MESSAGE_BYTES - 2**16
"""Longest block: it, its key and the fingerprint fit into one message."""

BATCH_BYTES = 2**20
"""A message is sent once it holds this much, so that its first block does not wait long for its last; pieces of a
manifest are as long."""

MAX_MANIFEST_BYTES = 256 * 2**20
"""Longest manifest, sealed; and most that a node keeps of manifests that are on their way."""

INSTANCE = "sightline-instance"
"""Key of the initial metadata that names what holds the blocks; what is kept under another name is not there."""

_TO_PROTO = {
    Outcome.HIT: kv_pb2.KV_OUTCOME_HIT,
    Outcome.MISS: kv_pb2.KV_OUTCOME_MISS,
    Outcome.RETRY: kv_pb2.KV_OUTCOME_RETRY,
}
_FROM_PROTO: dict[int, Outcome] = {number: outcome for outcome, number in _TO_PROTO.items()}


def key_to_proto(key: BlockKey) -> kv_pb2.KVKey:
    """Convert a key to its message."""
    return kv_pb2.KVKey(stream=key.stream, layer=key.layer, head=key.head, block=key.block)


def key_from_proto(message: kv_pb2.KVKey) -> BlockKey:
    """Convert a message to its key."""
    return BlockKey(message.stream, message.layer, message.head, message.block)


def outcome_to_proto(outcome: Outcome) -> kv_pb2.KVOutcome:
    """Convert an outcome to its enum number."""
    return _TO_PROTO[outcome]


def outcome_from_proto(number: int) -> Outcome:
    """Outcome of a protobuf number; ``RETRY`` for one that only a newer peer knows."""
    return _FROM_PROTO.get(number, Outcome.RETRY)


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """``items`` in order, in lists of about :data:`BATCH_BYTES` and at most :data:`MAX_KV_BYTES`; the caller refuses
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
    """``keys`` in order, cut where the layer changes and after ``most``."""
    start = 0
    for end in range(1, len(keys) + 1):
        if end == len(keys) or keys[end].layer != keys[start].layer or end - start == most:
            yield keys[start:end]
            start = end
