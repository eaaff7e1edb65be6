"""The other node dead, killed, stalled or full: RETRY in time, nothing more while it is so, and back without help."""

import threading
import time

import grpc
import pytest
from kv_parts import MemoryTier, Node, block, key, outcomes, process, remote, same, serving
from loop_thread import EventLoopThread
from lossy_link import LossyLink
from waiting import until

from cluster.codec.supervisor import Backoff
from cluster.lab.bench.processes import free_port
from cluster.memory.tiers import remote_peer
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.codec import Codec
from cluster.memory.tiers.stack import TierStack
from cluster.wire import channel

RETRY = Outcome.RETRY
NEVER = Backoff(first_s=600.0, longest_s=600.0)


def test_every_call_to_a_node_that_never_was_is_a_retry() -> None:
    with remote(f"127.0.0.1:{free_port()}", backoff=NEVER) as tier:
        assert tier.store([(key(1), block(1)), (key(2), block(2))]) == [RETRY, RETRY]
        assert not tier.state().up
        assert "failed to connect" in tier.state().reason
        assert outcomes(tier, [key(1)]) == [RETRY]
        assert [one.outcome for one in tier.load([key(1), key(2)])] == [RETRY, RETRY]
        assert tier.put_manifest("gate", b"x") is RETRY
        assert tier.manifest("gate") == (RETRY, None)
        assert tier.drop("gate", [key(1)]) is None
        assert tier.list_blocks("gate") == (Outcome.RETRY, [])
        assert tier.nbytes() == 0
        counts = tier.state().counts
        assert (counts["retries"], counts["failures"]) == (9, 1), "only the first call went out"


def test_a_node_that_comes_up_later_is_found() -> None:
    port = free_port()
    with remote(f"127.0.0.1:{port}") as tier:
        assert outcomes(tier, [key(1)]) == [RETRY]
        held = MemoryTier()
        held.store([(key(1), block(1))])
        with serving(held, port=port):
            until(lambda: tier.state().up)
            assert tier.state().reason == ""
            assert same(tier.load([key(1)])[0].block, block(1))


def test_a_node_is_found_again_although_no_thread_could_be_started_when_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, start = free_port(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        # gRPC's own calls would hang.
        if thread.name.startswith("kv "):
            raise RuntimeError("can't start new thread")
        start(thread)

    with remote(f"127.0.0.1:{port}") as tier:
        with monkeypatch.context() as limit:
            limit.setattr(threading.Thread, "start", refuse)
            assert outcomes(tier, [key(1)]) == [RETRY]
        with serving(MemoryTier(), port=port):
            until(lambda: tier.store([(key(1), block(1))]) == [Outcome.HIT])
            assert tier.state().up


def test_a_node_is_looked_for_also_after_a_channel_could_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the files of a certificate are being replaced."""
    port = free_port()
    opened, failed = remote_peer.open_blocking_channel, 0

    def failing(address: str, **options: object) -> grpc.Channel:
        nonlocal failed
        if address.endswith(f":{port}") and failed < 2:
            failed += 1
            raise OSError("no such file")
        return opened(address, **options)  # type: ignore[arg-type]

    with remote(f"127.0.0.1:{free_port()}", find=lambda: f"127.0.0.1:{port}") as tier:
        monkeypatch.setattr(remote_peer, "open_blocking_channel", failing)
        assert outcomes(tier, [key(1)]) == [RETRY]
        with serving(MemoryTier(), port=port):
            until(lambda: tier.state().up)
        assert failed == 2


def test_a_dead_connection_is_replaced_though_no_call_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link to the node lost the connection, and would carry another: probes are shorter than keepalive's pauses."""
    quick = [(name, value // 20 if name.endswith("_ms") else value) for name, value in channel.KEEPALIVE]
    monkeypatch.setattr(channel, "KEEPALIVE", quick)
    held = MemoryTier()
    held.store([(key(1), block(1))])
    with serving(held) as node, EventLoopThread() as loop:
        link = loop.run(LossyLink(node.address).__aenter__(), 10.0)
        with remote(link.address, deadline_s=0.1, backoff=Backoff(first_s=0.3, longest_s=0.3)) as tier:
            until(lambda: outcomes(tier, [key(1)]) == [Outcome.HIT])
            loop.loop.call_soon_threadsafe(link.cut)
            until(lambda: outcomes(tier, [key(1)]) == [RETRY])
            until(lambda: outcomes(tier, [key(1)]) == [Outcome.HIT], lambda: tier.state().reason, timeout_s=20.0)
        loop.run(link.__aexit__(), 10.0)


def test_a_node_killed_while_it_loads_gives_what_came_and_is_found_again() -> None:
    with process() as (node, port), remote(f"127.0.0.1:{port}", deadline_s=20.0) as tier:
        # Layer 0 comes, layer 1 never would.
        coming = tier.iter_loaded([key(cluster, layer) for layer in (0, 1) for cluster in range(8)])
        first = [next(coming) for _ in range(8)]
        assert all(same(one.block, block(cluster)) for cluster, one in enumerate(first))
        node.kill()
        began = time.monotonic()
        assert [one.outcome for one in coming] == [RETRY] * 8
        assert time.monotonic() - began < 10.0, "the deadline was not waited for"
        assert not tier.state().up
        node.wait(10.0)
        with serving(MemoryTier(), port=port):
            until(lambda: tier.state().up)
            assert tier.store([(key(0), block(0))]) == [Outcome.HIT]


def test_a_tier_that_stalls_costs_one_deadline_and_then_nothing() -> None:
    held = MemoryTier()
    held.gate.clear()
    with serving(held) as node, remote(node.address, deadline_s=0.3, backoff=NEVER) as tier:
        began = time.monotonic()
        assert outcomes(tier, [key(1)]) == [RETRY]
        assert 0.3 <= time.monotonic() - began < 20.0
        assert "did not answer within 0.3 s" in tier.state().reason
        for _ in range(100):
            assert tier.load([key(1)])[0].outcome is RETRY
        assert held.waiting == 1, "none of the hundred went out"
        assert tier.state().counts["failures"] == 1


@pytest.mark.parametrize("call", ["load", "store", "manifest", "nbytes"])
def test_whatever_stalls_the_tier_is_back_when_the_node_is(call: str) -> None:
    held = MemoryTier()
    held.gate.clear()
    arguments = {"load": [[key(1)]], "store": [[(key(1), block(1))]], "manifest": ["gate"]}
    with serving(held) as node, remote(node.address, deadline_s=0.5) as tier:
        getattr(tier, call)(*arguments.get(call, []))
        assert not tier.state().up
        held.gate.set()
        until(lambda: tier.state().up)
        assert tier.store([(key(2), block(2))]) == [Outcome.HIT]


def test_a_load_that_stalls_midway_keeps_what_came() -> None:
    held = MemoryTier()
    held.stuck = 1
    held.store([(key(1, layer), block(layer)) for layer in (0, 1)])
    with serving(held) as node, remote(node.address, deadline_s=1.0, backoff=NEVER) as tier:
        loaded = tier.load([key(1, 0), key(1, 1)])
        assert [one.outcome for one in loaded] == [Outcome.HIT, RETRY]
        assert not tier.state().up


def test_a_caller_that_takes_its_time_gets_retries_and_the_node_stays_up() -> None:
    held = MemoryTier()
    large = {key(1, layer): block(layer, tokens=3072, width=128) for layer in range(12)}
    held.store(list(large.items()))
    with serving(held) as node, remote(node.address, deadline_s=1.0) as tier:
        outcomes = []
        for one in tier.iter_loaded(list(large)):
            outcomes.append(one.outcome)
            if len(outcomes) == 1:
                time.sleep(1.1)
        assert outcomes[0] is Outcome.HIT
        assert outcomes[-1] is RETRY
        assert (tier.state().counts["late"], tier.state().up) == (1, True)


def test_under_a_stack_a_drop_that_could_not_be_told_is_made_up_for() -> None:
    held = MemoryTier()
    node = Node(held)
    try:
        with remote(node.address) as tier:
            stack = TierStack([Arena(2**23), tier])
            stack.store([(key(1), block(1)), (key(1, stream="yard"), block(2))])
            assert set(held.blocks) == {key(1), key(1, stream="yard")}
            port = int(node.address.rpartition(":")[2])
            node.stop()
            stack.drop("gate")
            assert set(held.blocks) == {key(1), key(1, stream="yard")}
            node = Node(held, port)
            until(lambda: tier.state().up)
            assert [one.outcome for one in stack.load([key(1)])] == [Outcome.MISS], "there, and not given out"
            stack.finish_deletions()
            assert set(held.blocks) == {key(1, stream="yard")}
            assert stack.deleting == frozenset()
    finally:
        node.stop()


def test_a_drop_that_was_refused_is_counted_so_that_it_can_be_made_up_for() -> None:
    held = MemoryTier()
    held.store([(key(1), block(1))])
    held.gate.clear()
    with serving(held, threads=1, waiting=0) as node, remote(node.address, deadline_s=10.0) as tier:
        reader = threading.Thread(target=lambda: outcomes(tier, [key(1)]))
        reader.start()
        until(lambda: node.servicer._under_way == 1)
        assert tier.drop("gate") is None
        assert (tier.state().up, tier.state().counts["retries"]) == (True, 1)
        held.gate.set()
        reader.join(10.0)


def test_a_node_with_too_much_to_do_refuses_and_is_not_taken_for_dead() -> None:
    held = MemoryTier()
    held.gate.clear()
    with serving(held, threads=1, waiting=1) as node, remote(node.address, deadline_s=10.0) as tier:
        answers: list[Outcome] = []
        threads = [threading.Thread(target=lambda: answers.extend(outcomes(tier, [key(1)]))) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: node.servicer._under_way == 2)
        assert outcomes(tier, [key(1)]) == [RETRY]
        assert (tier.state().up, tier.state().counts["refused"]) == (True, 1)
        assert node.servicer.counts["refused"] == 1
        held.gate.set()
        for thread in threads:
            thread.join(10.0)
        assert answers == [Outcome.MISS, Outcome.MISS]
        assert outcomes(tier, [key(1)]) == [Outcome.MISS]


def test_calls_that_were_given_up_still_count_until_the_tier_lets_go() -> None:
    held = MemoryTier()
    held.gate.clear()
    with serving(held, threads=1, waiting=0) as node:
        with remote(node.address, deadline_s=0.2, backoff=NEVER) as first:
            assert outcomes(first, [key(1)]) == [RETRY]
        with remote(node.address, deadline_s=5.0) as second:
            assert outcomes(second, [key(1)]) == [RETRY]
            assert second.state().counts["refused"] == 1
            held.gate.set()
            until(lambda: node.servicer._under_way == 0)
            assert outcomes(second, [key(1)]) == [Outcome.MISS]


def test_the_node_ends_a_call_whose_caller_would_wait_for_ever() -> None:
    held = MemoryTier()
    held.gate.clear()
    with serving(held, deadline_s=0.1) as node, remote(node.address, deadline_s=20.0, backoff=NEVER) as tier:
        assert outcomes(tier, [key(1)]) == [RETRY]
        assert not tier.state().up


def test_a_tier_that_fails_on_the_node_is_a_retry_with_its_reason() -> None:
    class Broken(MemoryTier):
        def load(self, keys):
            raise OSError("no space left on device")

    with serving(Broken()) as node, remote(node.address, backoff=NEVER) as tier:
        assert outcomes(tier, [key(1)]) == [RETRY]
        assert not tier.state().up
        assert "no space left on device" in tier.state().reason


def test_the_pause_grows_until_a_call_succeeds() -> None:
    attempts: list[int] = []

    class Recording(Backoff):
        def delay_s(self, attempt, draw):
            attempts.append(attempt)
            return 0.01

    class Moody(MemoryTier):
        good = False

        def load(self, keys):
            if not self.good:
                raise OSError("bad sector")
            return super().load(keys)

    held = Moody()
    with serving(held) as node, remote(node.address, backoff=Recording()) as tier:
        for good in (False, False, True, False):
            held.good = good
            until(lambda: tier.state().up)
            assert outcomes(tier, [key(1)]) == [Outcome.MISS if good else RETRY]
        until(lambda: tier.state().up)
    assert attempts == [0, 1, 0], "the node answers at once each time, and still fails at its work"


def test_a_store_of_more_than_there_is_time_for_stops_in_time_and_the_node_stays_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = Codec.encode

    def slowly(codec: Codec, key: BlockKey, block: Block) -> bytes:
        time.sleep(0.25)
        return encode(codec, key, block)

    monkeypatch.setattr(Codec, "encode", slowly)
    held = MemoryTier()
    with serving(held) as node, remote(node.address, deadline_s=2.0) as tier:
        outcomes = tier.store([(key(cluster), block(cluster)) for cluster in range(12)])
        assert tier.state().up
    assert outcomes[0] is Outcome.HIT
    assert outcomes[-1] is RETRY
    assert outcomes.count(Outcome.HIT) == len(held.blocks)


def test_closed_it_answers_retry_and_closing_twice_does_no_harm() -> None:
    with serving(MemoryTier()) as node, remote(node.address) as tier:
        assert outcomes(tier, [key(1)]) == [Outcome.MISS]
        tier.close()
        assert outcomes(tier, [key(1)]) == [RETRY]
        assert "closed" in tier.state().reason
        tier.close()


def test_closing_ends_a_call_that_waits() -> None:
    held = MemoryTier()
    held.gate.clear()
    with serving(held) as node, remote(node.address, deadline_s=20.0) as tier:
        answers: list[Outcome] = []
        thread = threading.Thread(target=lambda: answers.extend(outcomes(tier, [key(1)])))
        thread.start()
        until(lambda: held.waiting == 1)
        tier.close()
        thread.join(10.0)
        assert answers == [RETRY]
