"""A node that died comes back at another port, empty: it is looked up, met as another instance, and filled again."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kv_parts import QUICK, MemoryTier, Node, block, key, outcomes, remote, same, serving
from waiting import until

from cluster.errors import UnavailableError
from cluster.lab.bench.memory.footage import made_chunks
from cluster.lab.bench.node import FINGERPRINT
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import BlockKey, Outcome
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.stack import TierStack
from cluster.types import MemorySpec

HIT, MISS, RETRY = Outcome.HIT, Outcome.MISS, Outcome.RETRY
MIB = 2**20
SHAPE = {"layers": 2, "heads": 2, "rows": 3, "columns": 3, "width": 32}


@contextmanager
def node_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A node's process that holds 256 MiB, and its address."""
    started = subprocess.Popen(
        [sys.executable, "-m", "cluster.lab.bench.node", str(256 * MIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdin is not None
    assert started.stdout is not None
    with started.stdin, started.stdout:
        try:
            yield started, f"127.0.0.1:{json.loads(started.stdout.readline())['port']}"
        finally:
            started.kill()
            started.wait(10.0)


def remembered(bank: MemoryBank) -> dict[BlockKey, int]:
    """Every block that a memory knows, and its members."""
    memory = bank.get_memory("cam")[0]
    return {
        BlockKey("cam", layer, h, number): count
        for layer, h, head in memory.iter_heads()
        for number, count in zip(head.organiser.table.block.tolist(), head.organiser.table.count.tolist(), strict=True)
    }


def test_a_killed_node_is_found_at_its_new_port_and_gets_the_whole_memory_again() -> None:
    spec = MemorySpec(compressor="none", organiser="resv", block_frames=4, cap_bytes=64 * MIB)
    with node_process() as (first, old), node_process() as (_, new):
        where = [old]
        tier = RemoteTier(
            old, fingerprint=FINGERPRINT, deadline_s=10.0, backoff=QUICK, find=lambda: where[0], name="node"
        )
        bank = MemoryBank(TierStack([Arena(64 * MIB), tier]))
        bank.open_stream("cam", spec)
        for number, chunk in enumerate(made_chunks("cam", 40, **SHAPE)):
            if number == 24:
                first.kill()
                first.wait(10.0)
            bank.accept_chunk(chunk)
            bank.schedule_saves()
        assert bank.wait_written()
        assert not tier.state().up
        where[0] = new

        def whole() -> bool:
            bank.run_maintenance()
            assert bank.wait_written(30.0)
            memory, blocks = bank.get_memory("cam")[0], list(remembered(bank))
            busy = memory.settle_due or memory.unsaved or not memory.restored
            return not busy and tier.peer.address == new and outcomes(tier, blocks) == [HIT] * len(blocks)

        until(whole)
        # What another replica finds when this one is gone.
        known = remembered(bank)
        with remote(new, fingerprint=FINGERPRINT, deadline_s=10.0, name="node") as other:
            heir = MemoryBank(TierStack([Arena(64 * MIB), other]))
            heir.open_stream("cam", spec)
            assert remembered(heir) == known
            assert sum(known.values()) == 40 * 9 * 2 * 2, "every token of every layer and head"
            loaded = other.load(list(known))
            assert [len(one.block) if one.block else None for one in loaded] == list(known.values())
        tier.close()


def test_a_node_that_was_replaced_between_two_calls_counts_as_a_failure() -> None:
    held = MemoryTier()
    node = Node(held)
    port = int(node.address.rpartition(":")[2])
    try:
        with remote(node.address, deadline_s=10.0) as tier:
            tier.store([(key(1), block(1))])
            assert tier.state().counts.get("failures", 0) == 0
            node.stop()
            node = Node(MemoryTier(), port)
            # Whichever call notices it, or several: it is up again, empty, and that is counted.
            until(lambda: outcomes(tier, [key(1)]) == [MISS])
            assert tier.state().counts["restarts"] == 1
            assert tier.state().counts["failures"] >= 1
    finally:
        node.stop()


@pytest.mark.parametrize("call", ["load", "store", "put_manifest", "manifest", "drop", "nbytes"])
def test_every_call_notices_another_instance(call: str) -> None:
    arguments = {
        "load": [[key(1)]],
        "store": [[(key(1), block(1))]],
        "put_manifest": ["gate", b"x"],
        "manifest": ["gate"],
        "drop": ["gate"],
    }
    with serving(MemoryTier()) as node, remote(node.address, deadline_s=10.0) as tier:
        outcomes(tier, [key(1)])
        node.servicer.instance = "another"
        getattr(tier, call)(*arguments.get(call, []))
        assert (tier.state().counts["failures"], tier.state().counts["restarts"], tier.state().up) == (1, 1, True)


def test_a_lookup_that_fails_hangs_or_names_nonsense_leaves_the_last_address() -> None:
    asked: list[int] = []
    hangs = threading.Event()

    def find() -> str:
        asked.append(len(asked))
        if len(asked) == 1:
            raise UnavailableError("this node has no tier process")
        if len(asked) == 2:
            return "nonsense"
        hangs.wait(30.0)
        return node.address

    node = Node(MemoryTier())
    port = int(node.address.rpartition(":")[2])
    try:
        with remote(node.address, deadline_s=0.5, find=find) as tier:
            node.stop()
            assert outcomes(tier, [key(1)]) == [RETRY]
            until(lambda: len(asked) == 3)
            assert not tier.state().up
            # The third hangs: no other is begun beside it, and the node is found where it was.
            node = Node(MemoryTier(), port)
            until(lambda: tier.state().up)
            assert len(asked) == 3
            assert tier.store([(key(1), block(1))]) == [HIT]
            assert same(tier.load([key(1)])[0].block, block(1))
            hangs.set()
    finally:
        node.stop()
