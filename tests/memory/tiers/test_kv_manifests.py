"""Manifests go to a node in pieces and come back whole, whatever their length; what is cut, forged or too long replaces
nothing. Caps of a camera hold in the node itself."""

import ctypes
import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import safetensors.torch
import torch
from kv_parts import OURS, MemoryTier, block, key, remote, serving
from sightline.v1 import kv_pb2, kv_pb2_grpc
from waiting import until

from cluster.memory.manifest import dump_tensors, load_parts
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.codec import Codec
from cluster.memory.tiers.kv_wire import BATCH_BYTES, MAX_MANIFEST_BYTES, key_to_proto
from cluster.wire.channel import channel_options

HIT, MISS, RETRY = Outcome.HIT, Outcome.MISS, Outcome.RETRY
MIB = 2**20
SECRET = b"known to the processes of the cluster"


def pattern(nbytes: int) -> bytes:
    """No piece of it is like another."""
    return np.arange(nbytes // 8, dtype="<u8").tobytes() + bytes(nbytes % 8)


@pytest.mark.parametrize("nbytes", [0, 1, BATCH_BYTES - 30, BATCH_BYTES, 17 * MIB + 3, 60 * MIB])
def test_a_manifest_comes_back_as_it_went_also_above_the_limit_of_a_message(nbytes: int) -> None:
    arena = Arena(256 * MIB)
    with serving(arena) as node, remote(node.address, deadline_s=20.0) as tier, remote(node.address) as other:
        sent = pattern(nbytes)
        assert tier.put_manifest("gate", sent) is HIT
        assert other.manifest("gate") == (HIT, sent)
        assert other.manifest("yard") == (MISS, None)
        # Sealed: 22 bytes of header, 2 of length, the fingerprint.
        assert tier.nbytes("gate") == arena.nbytes("gate") == -(-(nbytes + 24 + len(OURS)) // 256) * 256
        assert node.servicer._moving == 0


def test_a_manifest_above_the_cap_is_never_sent_and_the_last_one_stays() -> None:
    with serving(Arena(256 * MIB)) as node, remote(node.address) as tier:
        tier.set_cap("gate", 2 * MIB)
        assert tier.put_manifest("gate", b"small") is HIT
        assert tier.put_manifest("gate", bytes(2 * MIB)) is MISS
        assert (tier.state().counts["too_large"], tier.state().up) == (1, True)
        assert tier.manifest("gate") == (HIT, b"small")


def test_the_node_keeps_a_client_to_the_cap_of_its_own_configuration() -> None:
    """Four blocks of 8,256 bytes in cells of 8,896 and a manifest; the node allows 40,000 bytes for a camera."""
    arena = Arena(16 * MIB, name="node", stream_bytes=40_000)
    items = [(key(number), block(number, tokens=129, width=7)) for number in range(8)]
    with serving(arena) as node, remote(node.address) as bold, remote(node.address) as humble:
        bold.set_cap("gate", 2**40)
        assert bold.store(items).count(HIT) == 4
        assert arena.nbytes("gate") <= 40_000
        assert bold.put_manifest("gate", bytes(20_000)) is HIT
        assert arena.nbytes("gate") <= 40_000
        assert bold.put_manifest("gate", bytes(40_000)) is MISS
        assert bold.manifest("gate") == (HIT, bytes(20_000))
        humble.set_cap("yard", 20_000)
        assert (
            humble.store([(key(number, stream="yard"), part) for (number, (_, part)) in enumerate(items)]).count(HIT)
            == 2
        )
        assert humble.put_manifest("yard", bytes(100)) is HIT
        assert arena.nbytes("yard") <= 20_000


# -- what comes is not what was to come ------------------------------------------------------------
def put(address: str, messages: Iterator[kv_pb2.PutManifestRequest], timeout_s: float = 10.0) -> int:
    with grpc.insecure_channel(address, channel_options(address, internal=True)) as channel:
        return int(kv_pb2_grpc.KVStub(channel).PutManifest(messages, timeout=timeout_s).outcome)


def first(nbytes: int, piece: bytes) -> kv_pb2.PutManifestRequest:
    return kv_pb2.PutManifestRequest(fingerprint=OURS, stream="gate", bytes=nbytes, piece=piece)


@pytest.mark.parametrize(
    ("messages", "code", "sentence"),
    [
        ([first(MAX_MANIFEST_BYTES + 1, b"")], grpc.StatusCode.RESOURCE_EXHAUSTED, "this node takes up to 268435456"),
        ([first(10, b"abc")], grpc.StatusCode.INVALID_ARGUMENT, "of 10 bytes, received 3"),
        ([first(4, b"abc"), first(0, b"de")], grpc.StatusCode.INVALID_ARGUMENT, "of 4 bytes, received 5"),
    ],
)
def test_a_manifest_of_another_length_than_was_said_is_refused(
    messages: list[kv_pb2.PutManifestRequest], code: grpc.StatusCode, sentence: str
) -> None:
    with serving(Arena(16 * MIB)) as node, remote(node.address) as tier:
        tier.put_manifest("gate", b"ours")
        with pytest.raises(grpc.RpcError) as caught:
            put(node.address, iter(messages))
        assert caught.value.code() is code
        assert sentence in caught.value.details()
        assert tier.manifest("gate") == (HIT, b"ours")
        assert node.servicer._moving == 0


def test_manifests_on_their_way_are_bounded_and_one_that_stops_coming_is_given_up() -> None:
    def stopping(go_on: threading.Event) -> Iterator[kv_pb2.PutManifestRequest]:
        yield first(MAX_MANIFEST_BYTES - 100, b"a beginning")
        go_on.wait(30.0)

    go_on = threading.Event()
    with serving(Arena(16 * MIB), deadline_s=2.0) as node, remote(node.address) as tier:
        codes: list[grpc.StatusCode] = []

        def stop_midway() -> None:
            try:
                put(node.address, stopping(go_on), timeout_s=30.0)
            except grpc.RpcError as error:
                codes.append(error.code())

        slow = threading.Thread(target=stop_midway)
        slow.start()
        until(lambda: node.servicer._moving > 0)
        assert tier.put_manifest("gate", bytes(100)) is RETRY
        assert (tier.state().counts["refused"], tier.state().up) == (1, True)
        slow.join(20.0)
        go_on.set()
        assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED]
        until(lambda: node.servicer._moving == 0)
        assert tier.put_manifest("gate", bytes(100)) is HIT


def test_more_than_there_is_time_for_is_late_and_the_node_stays_up() -> None:
    class Slow(MemoryTier):
        def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
            return HIT, bytes(250 * MIB)

    with serving(Slow()) as node, remote(node.address, deadline_s=0.25) as tier:
        until(lambda: tier.manifest("gate")[0] is RETRY and tier.state().counts.get("late", 0) > 0)
        until(lambda: tier.state().up)


# -- forged ----------------------------------------------------------------------------------------
def test_who_does_not_have_the_secret_puts_nothing_into_a_node() -> None:
    arena = Arena(16 * MIB)
    with serving(arena, secret=SECRET) as node, remote(node.address, secret=SECRET) as ours:
        ours.store([(key(1), block(1))])
        ours.put_manifest("gate", b"ours")
        for secret in (b"", b"another"):
            with remote(node.address, secret=secret) as theirs:
                assert theirs.store([(key(1), block(66)), (key(2), block(2))]) == [RETRY, RETRY]
                assert theirs.put_manifest("gate", b"theirs") is RETRY
                assert [one.outcome for one in theirs.load([key(1)])] == [MISS]
                assert theirs.manifest("gate") == (MISS, None)
                assert theirs.state().counts["damaged"] == 2
        assert node.servicer.counts["damaged"] == 6
        assert [one.outcome for one in ours.load([key(1), key(2)])] == [HIT, MISS]
        assert ours.manifest("gate") == (HIT, b"ours")


def test_a_node_that_answers_with_forged_replayed_or_no_sense_gives_misses() -> None:
    """The node is somebody else's: it has no secret, and what it once heard."""

    class Liar(MemoryTier):
        said = b""

        def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
            return HIT, self.said

    liar = Liar()
    liar.store([(key(1), block(1))])
    ours = Codec(OURS, SECRET).encode(key(2), block(2))
    with serving(liar) as node, remote(node.address, secret=SECRET) as tier:
        assert [one.outcome for one in tier.load([key(1)])] == [MISS]
        node.servicer._outgoing = lambda name, loaded: kv_pb2.LoadedBlock(outcome=kv_pb2.KV_OUTCOME_HIT, data=ours)
        assert [one.outcome for one in tier.load([key(1)])] == [MISS], "another cluster's block"
        node.servicer._outgoing = lambda name, loaded: kv_pb2.LoadedBlock(
            outcome=kv_pb2.KV_OUTCOME_HIT, data=b"\0" * 99
        )
        assert [one.outcome for one in tier.load([key(1)])] == [MISS]
        for liar.said in (
            b"",
            b"no manifest",
            Codec(OURS).encode_manifest("gate", b"forged"),
            Codec(OURS, SECRET).encode_manifest("yard", b"another camera's"),
            Codec(OURS, SECRET).encode_manifest("gate", b"cut")[:-1],
        ):
            assert tier.manifest("gate") == (MISS, None)
        assert tier.state().counts["damaged"] == 8
        assert tier.state().up


def test_a_node_that_answers_for_fewer_blocks_than_were_asked_gives_retries() -> None:
    with serving(MemoryTier()) as node, remote(node.address) as tier:
        node.servicer._load = lambda keys: [kv_pb2.LoadReply()]
        node.servicer._store = lambda request: []
        assert [one.outcome for one in tier.load([key(1), key(2)])] == [RETRY, RETRY]
        assert tier.store([(key(1), block(1))]) == [RETRY]
        assert tier.state().up


def test_caps_are_sent_with_each_block_so_that_a_node_started_anew_knows_them() -> None:
    arena = Arena(16 * MIB)
    with serving(arena) as node, remote(node.address) as tier:
        seen: list[kv_pb2.StoredBlock] = []
        storing = node.servicer._store
        node.servicer._store = lambda request: [seen.extend(request.blocks), storing(request)][1]
        tier.set_cap("gate", 5 * MIB)
        tier.store([(key(1), block(1)), (key(1, stream="yard"), block(1))])
        assert [arena.cap(stream) for stream in ("gate", "yard")] == [5 * MIB, 16 * MIB]
        assert tier.drop("gate", [key(1)]) == 1
        assert arena.cap("gate") == 5 * MIB
        assert tier.drop("gate") == 0
        assert arena.cap("gate") == 16 * MIB, "of a deleted stream, whose name may never come back"
    told = [(stored.key.stream, stored.cap_bytes) for stored in seen]
    assert told == [("gate", 5 * MIB), ("yard", 0)]
    assert seen[0].key == key_to_proto(key(1))


def test_serialising_tensors_of_ever_new_sizes_holds_nothing() -> None:
    dump_tensors({"first": torch.zeros(1)})
    before = len(ctypes._pointer_type_cache)
    sizes = range(1000, 1200)
    for size in sizes:
        tensor = torch.arange(size)
        assert torch.equal(load_parts(dump_tensors({"tensor": tensor}))["tensor"], tensor)
    assert len(ctypes._pointer_type_cache) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(0, 4), (), (3, 2)])
def test_tensors_are_written_as_safetensors_does(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {"a": torch.ones(shape, dtype=dtype), "b": torch.zeros(5, dtype=torch.int32)}
    assert dump_tensors(tensors, {"x": 1}) == safetensors.torch.save(tensors, metadata={"sightline": '{"x": 1}'})
