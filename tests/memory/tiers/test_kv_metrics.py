"""What a node's tier shows of itself is what its callers saw: calls, blocks, bytes; and the page it is on."""

import asyncio
import threading
import urllib.request

import grpc
import pytest
from kv_parts import OURS, MemoryTier, block, key, outcomes, remote, serving
from prometheus_client import CollectorRegistry
from sightline.v1 import kv_pb2, kv_pb2_grpc
from waiting import until

from actors import tier as actor
from cluster import metrics
from cluster.codec.supervisor import Backoff
from cluster.config import load_config
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.codec import Codec
from cluster.memory.tiers.kv_wire import key_to_proto
from cluster.memory.tiers.metrics import NodeTierCollector
from cluster.memory.tiers.remote import RemoteTier

NEVER = Backoff(first_s=600.0, longest_s=600.0)
TIER = "sightline_node_tier_"


class Grown:
    """By how much series grew since this was made; other tests count in the same process."""

    def __init__(self) -> None:
        self._before = self._now()

    def _now(self) -> dict[tuple[str, ...], float]:
        samples = [sample for family in metrics.REGISTRY.collect() for sample in family.samples]
        return {(each.name.removeprefix(TIER), *each.labels.values()): each.value for each in samples}

    def __call__(self, name: str) -> dict[tuple[str, ...], float]:
        """By labels, those that grew."""
        grown = {series: value - self._before.get(series, 0) for series, value in self._now().items()}
        return {series[1:]: value for series, value in grown.items() if series[0] == name and value}


@pytest.fixture
def grown() -> Grown:
    return Grown()


def shown(*collectors: NodeTierCollector) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {(each.name.removeprefix(TIER), *each.labels.values()): each.value for each in samples}


def test_calls_blocks_and_bytes_are_those_that_the_caller_counts(grown: Grown) -> None:
    with serving(Arena(8 << 20)) as node, remote(node.address, deadline_s=20.0) as tier:
        assert tier.store([(key(cluster), block(cluster)) for cluster in (1, 2, 3)]) == [Outcome.HIT] * 3
        assert [one.outcome for one in tier.load([key(1), key(9), key(3), key(8)])].count(Outcome.HIT) == 2
        tier.put_manifest("gate", b"all of it")
        tier.manifest("gate")
        tier.drop("gate", [key(1)])
        counts = tier.state().counts
    methods = ("store", "load", "drop", "put_manifest", "get_manifest")
    assert grown("requests_total") == {(method, "ok"): 1 for method in methods}
    assert grown("request_seconds_count") == {(method,): 1 for method in methods}
    assert grown("blocks_total") == {
        ("store", "hit"): 3,
        ("load", "hit"): 2,
        ("load", "miss"): 2,
    }
    assert grown("moved_bytes_total") == {("in",): counts["bytes_out"], ("out",): counts["bytes_in"]}


def test_damaged_and_foreign_blocks(grown: Grown) -> None:
    arena = Arena(8 << 20)
    whole = Codec(OURS).encode(key(1), block(1))
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    foreign = Codec("another/model").encode(key(3), block(3))
    with serving(arena) as node, grpc.insecure_channel(node.address) as channel:
        stub = kv_pb2_grpc.KVStub(channel)
        blocks = [
            kv_pb2.StoredBlock(key=key_to_proto(key(at)), data=data)
            for at, data in ((1, whole), (2, damaged), (3, foreign))
        ]
        stub.Store(iter([kv_pb2.StoreRequest(fingerprint=OURS, blocks=blocks)]), timeout=20)
        page = shown(NodeTierCollector(8 << 20, lambda: (arena, node.servicer)))
    assert grown("blocks_total") == {("store", "hit"): 1, ("store", "retry"): 1, ("store", "miss"): 1}
    assert {event: page["events_total", event] for event in ("stored", "damaged", "foreign", "too_large")} == {
        "stored": 1,
        "damaged": 1,
        "foreign": 1,
        "too_large": 0,
    }


def test_what_is_held_and_what_was_evicted() -> None:
    limit = 1 << 20
    arena = Arena(limit, slab_bytes=1 << 18)
    with serving(arena) as node:
        collector = NodeTierCollector(limit, lambda: (arena, node.servicer))
        keys = [key(cluster, stream=f"camera-{cluster % 3}") for cluster in range(60)]
        for one in keys:
            arena.store([(one, block(one.block, tokens=128, width=32))])
        arena.drop("camera-0")
        held = [one for one, outcome in zip(keys, arena.lookup(keys), strict=True) if outcome is Outcome.HIT]
        page, nbytes = shown(collector), arena.nbytes()
    assert 0 < len(held) < 40, "some were evicted, of those that were not dropped"
    assert (page["held_blocks",], page["cameras",]) == (len(held), len({one.stream for one in held}))
    gone = page["events_total", "evicted"] + page["events_total", "dropped"]
    assert (page["events_total", "stored"], gone) == (60, 60 - len(held))
    assert page["bytes", "held"] == nbytes <= page["bytes", "reserved"] <= page["bytes", "limit"] == limit


def test_before_a_replica_said_which_model_there_are_zeros() -> None:
    page = shown(NodeTierCollector(4096, lambda: None))
    assert page.pop(("bytes", "limit")) == 4096
    assert set(page.values()) == {0}
    assert {
        ("held_blocks",),
        ("bytes", "held"),
        ("events_total", "evicted"),
        ("events_total", "damaged"),
    } <= page.keys()


def test_a_call_that_is_refused(grown: Grown) -> None:
    held = MemoryTier()
    held.gate.clear()
    with serving(held, threads=1, waiting=0) as node, remote(node.address, deadline_s=20.0) as tier:
        reader = threading.Thread(target=lambda: outcomes(tier, [key(1)]))
        reader.start()
        until(lambda: held.waiting == 1)
        assert tier.load([key(1)])[0].outcome is Outcome.RETRY
        assert grown("requests_total") == {("load", "refused"): 1}
        held.gate.set()
        reader.join(20.0)
    assert grown("requests_total") == {("load", "refused"): 1, ("load", "ok"): 1}


@pytest.mark.parametrize(("theirs_s", "ours_s"), [(0.3, 30.0), (20.0, 0.2)])
def test_a_call_is_late_by_its_callers_deadline_or_ours(grown: Grown, theirs_s: float, ours_s: float) -> None:
    held = MemoryTier()
    held.gate.clear()
    with serving(held, deadline_s=ours_s) as node, remote(node.address, deadline_s=theirs_s, backoff=NEVER) as tier:
        assert outcomes(tier, [key(1)]) == [Outcome.RETRY]
        until(lambda: grown("requests_total") == {("load", "late"): 1})
        held.gate.set()


def test_a_caller_that_leaves_early(grown: Grown) -> None:
    held = MemoryTier()
    held.gate.clear()
    with serving(held) as node, grpc.insecure_channel(node.address) as channel:
        request = kv_pb2.LoadRequest(fingerprint=OURS, keys=[key_to_proto(key(1))])
        call = kv_pb2_grpc.KVStub(channel).Load(request, timeout=30)
        until(lambda: held.waiting == 1)
        call.cancel()
        until(lambda: grown("requests_total") == {("load", "left"): 1})
        held.gate.set()


def test_a_call_that_fails_and_one_that_is_none_of_ours(grown: Grown) -> None:
    class Broken(MemoryTier):
        def load(self, keys):
            raise OSError("no space left on device")

    with serving(Broken()) as node:
        with remote(node.address, backoff=NEVER) as tier:
            assert outcomes(tier, [key(1)]) == [Outcome.RETRY]
        with grpc.insecure_channel(node.address) as channel:
            store = channel.stream_unary("/sightline.v1.KV/Store")
            with pytest.raises(grpc.RpcError):
                store(iter([b"\xff\xff\xff no message"]), timeout=20)
    assert grown("requests_total") == {("load", "failed"): 1, ("store", "invalid"): 1}


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as reply:
        return str(reply.read().decode())


async def test_the_actor_has_a_page_of_its_own_as_long_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray: the class that Ray makes an actor of."""
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    node = actor.TierNode(load_config(None, {"tiers": {"node_bytes": "64MiB"}}), "tier-a", "127.0.0.1")
    address = await node.metrics_address()
    try:
        assert 'sightline_node_tier_held_blocks{process="tier-a"} 0.0' in await asyncio.to_thread(scrape, address)
        tier = RemoteTier(await node.open(OURS), fingerprint=OURS, deadline_s=20.0)
        try:
            await asyncio.to_thread(tier.store, [(key(1), block(1)), (key(2), block(2))])
        finally:
            await asyncio.to_thread(tier.close)
        page = await asyncio.to_thread(scrape, address)
        assert 'sightline_node_tier_held_blocks{process="tier-a"} 2.0' in page
        assert 'sightline_node_tier_bytes{kind="limit",process="tier-a"} 6.7108864e+07' in page
        assert 'sightline_node_tier_events_total{event="stored",process="tier-a"} 2.0' in page
        await node.open("another/model")
        assert 'sightline_node_tier_held_blocks{process="tier-a"} 0.0' in await asyncio.to_thread(scrape, address)
    finally:
        await node.stop()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scrape, address)
