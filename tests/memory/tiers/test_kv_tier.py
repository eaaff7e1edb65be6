"""Blocks go to another node and come back the same; what cannot be had is a miss or a retry, never a wrong block."""

import threading

import grpc
import pytest
from kv_parts import OURS, MemoryTier, Node, block, key, outcomes, remote, same, serving
from sightline.v1 import kv_pb2, kv_pb2_grpc
from waiting import until

from cluster.errors import ConfigError
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import BlockKey, Loaded, Outcome
from cluster.memory.tiers.codec import Codec
from cluster.memory.tiers.kv_wire import (
    BATCH_BYTES,
    MAX_KV_BYTES,
    MAX_KV_MESSAGE_BYTES,
    batches,
    key_to_proto,
    message_runs,
)
from cluster.memory.tiers.remote import RemoteTier
from cluster.wire.channel import channel_options
from cluster.wire.status import is_ours


@pytest.fixture(scope="module")
def node():
    with serving(MemoryTier()) as started:
        yield started


@pytest.fixture
def tier(node):
    node.servicer._tier.blocks.clear()
    node.servicer._tier.manifests.clear()
    node.servicer.counts.clear()
    with remote(node.address, deadline_s=10.0) as client:
        yield client


def test_blocks_come_back_as_they_went_in_the_order_asked(tier: RemoteTier) -> None:
    items = [(key(cluster, layer), block(cluster, tokens=cluster)) for layer in (0, 1) for cluster in range(5)]
    assert tier.store(items) == [Outcome.HIT] * 10
    asked = [key(7), *(name for name, _ in reversed(items)), key(3, layer=1)]
    held = dict(items)
    loaded = tier.load(asked)
    assert [one.outcome for one in loaded] == [Outcome.MISS, *[Outcome.HIT] * 11]
    assert all(same(one.block, held[name]) for name, one in zip(asked[1:], loaded[1:], strict=True))
    counts = tier.state().counts
    assert (counts["stored"], counts["hits"], counts["misses"]) == (10, 11, 1)
    assert counts["bytes_in"] > counts["bytes_out"] > sum(part.nbytes for part in held.values())


def test_much_more_than_a_message_holds_passes_in_several(tier: RemoteTier, node: Node) -> None:
    """Blocks of 3 MiB: 24 MiB each way."""
    items = [(key(cluster), block(cluster, tokens=3072, width=128)) for cluster in range(8)]
    assert tier.store(items) == [Outcome.HIT] * 8
    assert tier.nbytes("gate") == tier.nbytes() == sum(one.nbytes for _, one in items)
    loaded = tier.load([name for name, _ in items])
    assert all(same(one.block, sent) for one, (_, sent) in zip(loaded, items, strict=True))
    assert node.servicer.counts == {}


def test_a_store_replaces_and_a_drop_leaves_nothing(tier: RemoteTier, node: Node) -> None:
    tier.store([(key(1), block(1)), (key(2), block(2)), (key(1, stream="yard"), block(3))])
    tier.store([(key(1), block(9))])
    tier.put_manifest("gate", b"all of it")
    assert same(tier.load([key(1)])[0].block, block(9))
    wanted = {key(1), key(2), key(1, stream="yard")}
    assert {one for name in ("gate", "yard") for one in tier.list_blocks(name)[1]} == wanted
    assert tier.list_blocks("lane") == (Outcome.HIT, [])
    assert tier.drop("gate", [key(1), key(5)]) == 1
    assert outcomes(tier, [key(1), key(2)]) == [Outcome.MISS, Outcome.HIT]
    assert tier.manifest("gate") == (Outcome.HIT, b"all of it")
    assert tier.drop("gate") == 1
    assert outcomes(tier, [key(2), key(1, stream="yard")]) == [Outcome.MISS, Outcome.HIT]
    assert tier.manifest("gate") == (Outcome.MISS, None)
    assert tier.nbytes("gate") == 0
    assert list(node.servicer._tier.blocks) == [key(1, stream="yard")]


def test_more_keys_than_a_message_holds_are_dropped(tier: RemoteTier, node: Node) -> None:
    camera = "c" * 256
    items = [(key(cluster, stream=camera), block(cluster)) for cluster in (0, 69_999, 70_000)]
    assert tier.store(items) == [Outcome.HIT] * 3
    keys = [key(cluster, stream=camera) for cluster in range(70_000)]
    assert sum(key_to_proto(each).ByteSize() for each in keys) > MAX_KV_MESSAGE_BYTES
    assert tier.drop(camera, keys) == 2
    assert tier.list_blocks(camera) == (Outcome.HIT, [key(70_000, stream=camera)])


def test_dropping_no_keys_drops_nothing(tier: RemoteTier) -> None:
    tier.store([(key(1), block(1))])
    assert tier.drop("gate", []) == 0
    assert outcomes(tier, [key(1)]) == [Outcome.HIT]


def test_nothing_asked_is_nothing_answered(tier: RemoteTier) -> None:
    assert (tier.store([]), tier.load([])) == ([], [])


def test_the_first_layer_is_there_while_the_second_is_still_being_read() -> None:
    held = MemoryTier()
    held.stuck = 1
    held.store([(key(1, layer), block(layer)) for layer in (0, 1)])
    with serving(held) as node, remote(node.address, deadline_s=10.0) as tier:
        coming = tier.iter_loaded([key(1, 0), key(1, 1)])
        assert same(next(coming).block, block(0))
        until(lambda: held.loads == [[key(1, 0)], [key(1, 1)]])
        held.free.set()
        assert same(next(coming).block, block(1))
        assert list(coming) == []


def test_blocks_of_another_fingerprint_are_misses_and_counted(tier: RemoteTier, node: Node) -> None:
    tier.store([(key(1), block(1))])
    tier.put_manifest("gate", b"ours")
    with remote(node.address, fingerprint="tiny/fp16") as other:
        assert [one.outcome for one in other.load([key(1)])] == [Outcome.MISS]
        assert other.manifest("gate") == (Outcome.MISS, None)
        assert other.put_manifest("gate", b"theirs") is Outcome.MISS
        assert other.store([(key(1), block(2))]) == [Outcome.MISS]
        assert other.drop("gate") == 0
        assert other.nbytes() == 0
        assert other.state().up
    assert node.servicer.counts["foreign"] == 4
    assert same(tier.load([key(1)])[0].block, block(1))
    assert tier.manifest("gate") == (Outcome.HIT, b"ours")


def raw(node: Node) -> tuple[grpc.Channel, kv_pb2_grpc.KVStub]:
    channel = grpc.insecure_channel(node.address, channel_options(node.address, internal=True))
    return channel, kv_pb2_grpc.KVStub(channel)


def test_a_block_with_one_bit_changed_is_not_stored(tier: RemoteTier, node: Node) -> None:
    data = bytearray(Codec(OURS).encode(key(1), block(1)))
    data[-1] ^= 4
    good = Codec(OURS).encode(key(2), block(2))
    stored = [
        kv_pb2.StoredBlock(key=key_to_proto(name), data=bytes(part))
        # The third is whole, and another cluster's.
        for name, part in ((key(1), data), (key(2), good), (key(3), good))
    ]
    channel, stub = raw(node)
    with channel:
        reply = stub.Store(iter([kv_pb2.StoreRequest(fingerprint=OURS, blocks=stored)]), timeout=5.0)
    retry, hit = kv_pb2.KV_OUTCOME_RETRY, kv_pb2.KV_OUTCOME_HIT
    assert list(reply.outcomes) == [retry, hit, retry]
    assert node.servicer.counts == {"damaged": 2}
    assert outcomes(tier, [key(1), key(2), key(3)]) == [Outcome.MISS, Outcome.HIT, Outcome.MISS]


def test_a_block_that_arrives_damaged_or_foreign_is_a_miss_and_counted() -> None:
    class Meddling(MemoryTier):
        """What leaves the node is not what was asked for."""

    held = Meddling()
    held.store([(key(cluster), block(cluster)) for cluster in range(3)])
    with serving(held) as node, remote(node.address, deadline_s=10.0) as tier:
        outgoing = node.servicer._outgoing

        def meddle(name: BlockKey, loaded: Loaded) -> kv_pb2.LoadedBlock:
            answer = outgoing(name, loaded)
            if name == key(0):
                answer.data = answer.data[:-1] + bytes([answer.data[-1] ^ 1])
            if name == key(1):
                answer.data = Codec("tiny/fp16").encode(name, block(1))
            return answer

        node.servicer._outgoing = meddle
        loaded = tier.load([key(0), key(1), key(2)])
        assert [one.outcome for one in loaded] == [Outcome.MISS, Outcome.MISS, Outcome.HIT]
        assert loaded[0].block is None
        counts = tier.state().counts
        assert (counts["damaged"], counts["foreign"], counts["misses"], counts["hits"]) == (1, 1, 2, 1)
        assert tier.state().up


def test_a_message_over_the_limit_is_refused_with_a_sentence(node: Node, tier: RemoteTier) -> None:
    request = kv_pb2.PutManifestRequest(
        fingerprint=OURS, stream="gate", bytes=MAX_KV_MESSAGE_BYTES, piece=bytes(MAX_KV_MESSAGE_BYTES)
    )
    large = kv_pb2.StoredBlock(key=key_to_proto(key(1)), data=bytes(MAX_KV_MESSAGE_BYTES))
    store = kv_pb2.StoreRequest(fingerprint=OURS, blocks=[large])
    channel, stub = raw(node)
    with channel:
        for ask in (
            lambda: stub.PutManifest(iter([request]), timeout=10.0),
            lambda: stub.Store(iter([store]), timeout=10.0),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert is_ours(caught.value)
            assert f"this node takes up to {MAX_KV_MESSAGE_BYTES}" in caught.value.details()
    assert node.servicer.counts["too_large"] == 2
    assert tier.manifest("gate") == (Outcome.MISS, None)


def test_a_block_too_large_for_a_message_is_never_sent_and_the_others_are_stored(tier: RemoteTier) -> None:
    large = block(1, tokens=MAX_KV_BYTES // 8, width=1)
    assert tier.store([(key(1), large), (key(2), block(2))]) == [Outcome.MISS, Outcome.HIT]
    assert tier.state().counts["too_large"] == 1
    assert tier.state().up


def test_a_block_too_large_to_leave_the_node_is_a_miss() -> None:
    held = MemoryTier()
    held.store([(key(1), block(1, tokens=MAX_KV_BYTES // 8, width=1)), (key(2), block(2))])
    with serving(held) as node, remote(node.address, deadline_s=10.0) as tier:
        assert [one.outcome for one in tier.load([key(1), key(2)])] == [Outcome.MISS, Outcome.HIT]
        assert node.servicer.counts == {"too_large": 1}


def test_a_node_serves_its_arena_and_what_that_refuses_is_told_apart() -> None:
    """A block above the stream's cap can never be held; one that an arena without eviction has no room for might."""
    small, large = block(1, tokens=64, width=64), block(2, tokens=512, width=64)
    arena = Arena(2**20, evicts=False, stream_bytes=3 * 2**16, slab_bytes=2**18)
    with serving(arena) as node, remote(node.address, deadline_s=10.0) as tier:
        outcomes = tier.store([(key(0), large), *((key(number), small) for number in range(1, 9))])
        assert outcomes[:2] == [Outcome.MISS, Outcome.HIT]
        assert outcomes[-1] is Outcome.RETRY
        assert 0 < tier.nbytes("gate") == arena.nbytes("gate") <= 3 * 2**16
        loaded = tier.load([key(number) for number in range(9)])
        assert [one.outcome is Outcome.HIT for one in loaded] == [outcome is Outcome.HIT for outcome in outcomes]
        assert tier.drop("gate") == outcomes.count(Outcome.HIT)
        assert arena.nbytes() == 0


def test_many_threads_use_one_tier(tier: RemoteTier) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        mine = key(number, stream=f"camera {number}")
        for turn in range(5):
            sent = block(number * 10 + turn)
            if tier.store([(mine, sent)]) != [Outcome.HIT] or not same(tier.load([mine])[0].block, sent):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert wrong == []


def test_settings_that_could_never_work_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        RemoteTier("nowhere", fingerprint=OURS)
    with pytest.raises(ConfigError, match="fingerprint"):
        RemoteTier("127.0.0.1:1", fingerprint="")


def test_batches_are_bounded_and_keep_the_order() -> None:
    sizes = [1, BATCH_BYTES - 1, 5, MAX_KV_BYTES, MAX_KV_BYTES, 7, 0, BATCH_BYTES, 3]
    cut = list(batches(sizes, lambda size: size))
    assert [size for batch in cut for size in batch] == sizes
    assert all(sum(batch) <= MAX_KV_BYTES for batch in cut)
    assert cut == [[1, BATCH_BYTES - 1], [5], [MAX_KV_BYTES], [MAX_KV_BYTES], [7, 0, BATCH_BYTES], [3]]


def test_runs_are_cut_at_layers_and_at_the_bound() -> None:
    keys = [key(number, layer) for layer, count in ((0, 5), (2, 1), (0, 2)) for number in range(count)]
    cut = [[(one.layer, one.block) for one in run] for run in message_runs(keys, 2)]
    assert cut == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4)], [(2, 0)], [(0, 0), (0, 1)]]
    assert list(message_runs([], 2)) == []
