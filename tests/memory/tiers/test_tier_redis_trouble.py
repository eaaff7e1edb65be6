"""A Redis server that is down, slow, full, forgetful or not ours: what each does to the tier, and how it comes back."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import torch
from kv_parts import drop_everywhere
from loop_thread import EventLoopThread
from lossy_link import LossyLink
from redis_server import RedisServer

from cluster.memory.tiers import redis_link
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.codec import Codec
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.stack import TierStack

HIT, MISS, RETRY = Outcome.HIT, Outcome.MISS, Outcome.RETRY
DEADLINE_S = 0.6
Opened = Callable[..., RedisTier]


def key(number: int, stream: str = "yard") -> BlockKey:
    return BlockKey(stream, 0, 0, number)


def block(fill: float, count: int = 4) -> Block:
    kv = torch.full((count, 16), float(fill))
    return Block(kv, -kv, *torch.zeros(2, count, dtype=torch.int32))


def values(tier: RedisTier | TierStack, *keys: BlockKey) -> list[float | Outcome]:
    loaded = tier.load(keys)
    return [each.outcome if each.block is None else float(each.block.key[0, 0]) for each in loaded]


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not what():
        assert time.monotonic() < until, "it did not happen within 20 s"
        time.sleep(0.02)


@pytest.fixture
def opened(own_redis: RedisServer) -> Iterator[Opened]:
    """Makes tiers on the server, started or not."""
    made: list[RedisTier] = []

    def make(**options: object) -> RedisTier:
        settings = {"fingerprint": "m", "cap_bytes": 1 << 26, "ttl_s": 100, "deadline_s": DEADLINE_S, **options}
        made.append(RedisTier(**{"url": own_redis.url, **settings}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def test_down_from_the_start_it_refuses_and_comes_up_by_itself(own_redis: RedisServer, opened: Opened) -> None:
    tier = opened()
    assert not tier.state().up
    assert "cannot be reached" in tier.state().reason
    assert tier.store([(key(1), block(1))]) == [RETRY]
    assert values(tier, key(1), key(2)) == [RETRY, RETRY]
    assert tier.put_manifest("yard", b"") is RETRY
    assert tier.manifest("yard") == (RETRY, None)
    assert tier.drop("yard") is None
    assert tier.list_blocks("yard") == (RETRY, [])
    assert tier.nbytes("yard") == 0
    # Nobody but the first waited for the server.
    assert tier.state().counts["failures"] == 1
    assert tier.state().counts["retries"] == 7
    own_redis.start()
    wait_for(lambda: tier.state().up)
    assert tier.state().reason == ""
    assert tier.store([(key(1), block(1))]) == [HIT]


@pytest.mark.parametrize("want", ["threads", "memory"])
def test_it_comes_back_although_the_process_was_at_its_limit(
    want: str, own_redis: RedisServer, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of threads when the server died, or of memory when it was looked for."""
    own_redis.start()
    tier = opened()

    def refuse(*_: object) -> None:
        raise MemoryError if want == "memory" else RuntimeError("can't start new thread")

    with monkeypatch.context() as limit:
        if want == "threads":
            limit.setattr(threading.Thread, "start", refuse)
        own_redis.kill()
        assert values(tier, key(1)) == [RETRY]
        if want == "memory":
            limit.setattr(redis.Redis, "info", refuse)
            wait_for(lambda: tier.state().reason.endswith("reached: "))
        assert values(tier, key(1)) == [RETRY]
    own_redis.start()
    wait_for(lambda: tier.store([(key(1), block(1))]) == [HIT])
    assert (tier.state().up, tier.state().reason) == (True, "")


def test_a_server_that_dies_unused_is_missed(own_redis: RedisServer, opened: Opened) -> None:
    own_redis.start()
    stack = TierStack([Arena(1 << 20, name="host"), opened()])
    assert (stack.lowest.nbytes(), stack.trouble) == (0, "")
    own_redis.kill()
    # As every heartbeat does for the metrics.
    assert stack.lowest.nbytes() == 0
    assert stack.trouble.startswith("redis: the server cannot be reached")
    own_redis.start()
    wait_for(lambda: stack.trouble == "")


def test_killed_and_started_again_it_is_empty_and_is_filled_again(own_redis: RedisServer, opened: Opened) -> None:
    own_redis.start()
    tier = opened()
    tier.store([(key(n), block(n)) for n in range(3)])
    own_redis.kill()
    assert values(tier, key(1)) == [RETRY]
    assert not tier.state().up
    own_redis.start()
    wait_for(lambda: tier.state().up)
    assert values(tier, key(1)) == [MISS]
    assert tier.nbytes("yard") == 0
    assert tier.store([(key(1), block(5))]) == [HIT]
    name = "sightline:kv:kv:yard:0:0:1"
    assert tier.nbytes("yard") == own_redis.client.strlen(name) + 2 * len(name)
    assert tier.drop("yard") == 1
    assert not own_redis.names()


def test_a_restart_between_two_calls_is_noticed(own_redis: RedisServer, opened: Opened) -> None:
    own_redis.start()
    size = len(Codec("m").encode(key(0), block(0))) + 2 * len("sightline:kv:kv:yard:0:0:0")
    tier = opened(cap_bytes=3 * size)
    assert tier.store([(key(n), block(n)) for n in range(3)]) == [HIT] * 3
    own_redis.kill()
    own_redis.start()
    # Whether the first call fails or finds the server empty: soon there is room, because nothing is held.
    wait_for(lambda: tier.store([(key(9), block(9))]) == [HIT])
    assert tier.state().counts["failures"] >= 1
    assert tier.nbytes("yard") == size
    assert tier.store([(key(n), block(n)) for n in range(2)]) == [HIT] * 2


def test_a_server_that_was_emptied_while_it_ran_has_room_again(own_redis: RedisServer, opened: Opened) -> None:
    """By FLUSHALL, or by a resynchronisation: connections and run id stay."""
    own_redis.start()
    size = len(Codec("m").encode(key(0), block(0))) + 2 * len("sightline:kv:kv:yard:0:0:0")
    tier = opened(cap_bytes=3 * size)
    assert tier.store([(key(n), block(n)) for n in range(3)]) == [HIT] * 3
    own_redis.client.flushall()
    assert tier.store([(key(9), block(9))]) == [RETRY]
    assert tier.store([(key(9), block(9))]) == [HIT]
    assert tier.nbytes("yard") == size
    own_redis.client.flushall()
    manifest = bytes(3 * size // 2)
    wait_for(lambda: tier.put_manifest("yard", manifest) is HIT)


@pytest.mark.parametrize("how", ["frozen", "sleeping"])
def test_a_slow_server_costs_one_deadline_and_then_nothing(own_redis: RedisServer, opened: Opened, how: str) -> None:
    own_redis.start()
    tier = opened()
    tier.store([(key(1), block(1))])
    sleeping = threading.Thread(target=own_redis.client.execute_command, args=("DEBUG", "SLEEP", "1.5"))
    if how == "frozen":
        own_redis.freeze()
    else:
        sleeping.start()
        time.sleep(0.1)
    began = time.monotonic()
    assert values(tier, key(1)) == [RETRY]
    first = time.monotonic() - began
    for _ in range(100):
        assert tier.load([key(1)])[0].outcome is RETRY
        assert tier.store([(key(2), block(2))]) == [RETRY]
    # Twice the deadline is left for a busy machine.
    assert first < 2 * DEADLINE_S
    assert tier.state().counts["failures"] == 1
    if how == "frozen":
        own_redis.thaw()
    else:
        sleeping.join(20)
    wait_for(lambda: tier.state().up)
    assert values(tier, key(1), key(2)) == [1.0, MISS]


def test_connections_that_died_together_are_one_failure(own_redis: RedisServer, opened: Opened) -> None:
    """The link loses what was open on it, and carries what is opened later."""
    own_redis.start()
    with EventLoopThread() as loop, ThreadPoolExecutor(8) as readers:
        link = loop.run(LossyLink(f"127.0.0.1:{own_redis.port}").__aenter__(), 10.0)
        tier = opened(url=f"redis://{link.address}/0", deadline_s=3.0)
        tier.store([(key(1), block(1))])

        def read_at_once() -> list[float | Outcome]:
            sleeping = readers.submit(own_redis.client.execute_command, "DEBUG", "SLEEP", "0.3")
            time.sleep(0.1)
            found = [value for each in readers.map(lambda _: values(tier, key(1)), range(7)) for value in each]
            sleeping.result(20.0)
            return found

        assert read_at_once() == [1.0] * 7
        loop.loop.call_soon_threadsafe(link.cut)
        assert values(tier, key(1)) == [RETRY]
        wait_for(lambda: tier.state().up)
        assert read_at_once() == [1.0] * 7
        assert tier.state().counts["failures"] == 1
        loop.run(link.__aexit__(), 10.0)


def test_a_write_in_doubt_is_looked_up(own_redis: RedisServer, opened: Opened) -> None:
    own_redis.start()
    tier = opened()
    tier.store([(key(1), block(1))])
    own_redis.freeze()
    assert tier.store([(key(2), block(2))]) == [RETRY]
    own_redis.thaw()
    wait_for(lambda: tier.state().up)
    sizes = own_redis.client.hgetall("sightline:kv:sizes:yard")
    assert tier.nbytes("yard") == sum(map(int, sizes.values()))
    tier.drop("yard")
    assert not own_redis.names()


def test_a_full_server_keeps_what_it_has(own_redis: RedisServer, opened: Opened) -> None:
    own_redis.start("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    tier = opened()
    big = 1000
    outcomes = [tier.store([(key(n), block(n, big))])[0] for n in range(60)]
    held = outcomes.count(HIT)
    assert 5 < held < 60
    assert outcomes == [HIT] * held + [RETRY] * (60 - held)
    assert tier.state().up
    assert "full" in tier.state().reason
    assert tier.state().counts["full"] == 60 - held
    assert values(tier, *(key(n) for n in range(held))) == [float(n) for n in range(held)]
    # What could not be replaced is not given out as it was before, and that makes room.
    assert tier.store([(key(0), block(100, big))]) == [RETRY]
    assert values(tier, key(0)) == [MISS]
    assert tier.drop("yard", [key(n) for n in range(1, held)]) == held - 1
    assert tier.store([(key(0), block(100, big))]) == [HIT]
    assert tier.state().reason == ""
    assert len(own_redis.names()) == 2


def test_a_full_server_deletes_what_it_is_told_to(own_redis: RedisServer, opened: Opened) -> None:
    """It refuses every command of a transaction: nothing could be forgotten, nor room made."""
    own_redis.start()
    tier = opened()
    tier.store([(key(n), block(n)) for n in range(9)])
    tier.put_manifest("yard", b"")
    own_redis.client.config_set("maxmemory", 1)
    assert tier.store([(key(9), block(9))]) == [RETRY]
    assert tier.drop("yard", [key(0)]) == 1
    assert tier.drop("yard") == 8
    assert not own_redis.names()


def test_a_server_that_evicts_gives_misses_and_still_forgets_all(own_redis: RedisServer, opened: Opened) -> None:
    own_redis.start("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
    tier = opened()
    for n in range(60):
        assert tier.store([(key(n), block(n, 1000))]) == [HIT]
    found = values(tier, *(key(n) for n in range(60)))
    assert 0 < found.count(MISS) < 60
    assert all(value in (MISS, float(n)) for n, value in enumerate(found))
    size = len(Codec("m").encode(key(0), block(0, 1000)))
    names = sum(2 * len(f"sightline:kv:kv:yard:0:0:{n}") for n, value in enumerate(found) if value is not MISS)
    assert tier.nbytes("yard") == (60 - found.count(MISS)) * size + names
    # The hash of sizes may be evicted too, and its writer be gone.
    own_redis.client.delete("sightline:kv:sizes:yard")
    listed = opened().list_blocks("yard")[1]
    assert 0 < len(listed) <= 60 - found.count(MISS)
    assert opened().drop("yard") == len(listed)
    assert not own_redis.names()
    # A scan takes for this stream's only what is.
    opened().store([(key(0, name), block(0)) for name in ("yard", "yard*", "yard:0")])
    own_redis.client.delete("sightline:kv:sizes:yard")
    assert opened().drop("yard") == 1
    assert {name for name in own_redis.names() if ":kv:kv:" in name} == {
        "sightline:kv:kv:yard*:0:0:0",
        "sightline:kv:kv:yard:0:0:0:0",
    }


EVICTING = "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"


@pytest.fixture
def crowded_redis(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """Evicts, and has so many keys of others that a scan takes far more steps than a third of the deadline allows."""
    own_redis.start(*EVICTING)
    own_redis.client.execute_command("DEBUG", "POPULATE", 100_000, "sightline:kv:kv:other:0:0", 10)
    monkeypatch.setattr(redis_link, "_SCANNED_AT_ONCE", 10)
    return own_redis


def test_a_deletion_longer_than_a_deadline_goes_on_where_it_stopped(crowded_redis: RedisServer, opened: Opened) -> None:
    own_redis, tier = crowded_redis, opened()
    stack = TierStack([tier])
    assert stack.store([(key(n), block(n)) for n in range(3)]) == [HIT] * 3
    # As if evicted: only the scan finds these.
    own_redis.client.delete("sightline:kv:sizes:yard")
    tier.manifest("yard")
    assert stack.drop("yard") is None
    wait_for(lambda: stack.finish_deletions() is None and not stack.deleting)
    assert not [name for name in own_redis.names() if ":yard" in name]
    assert stack.store([(key(7), block(7))]) == [HIT]
    # What was stored since a deletion stopped is found by the next one, and so is all on another server.
    assert tier.drop("yard") is None
    own_redis.kill()
    own_redis.start(*EVICTING)
    own_redis.client.set("sightline:kv:kv:yard:0:0:9", b"x")
    wait_for(lambda: tier.drop("yard") is not None)
    assert not own_redis.names()


def test_a_listing_longer_than_a_deadline_goes_on_where_it_stopped(crowded_redis: RedisServer, opened: Opened) -> None:
    own_redis, tier = crowded_redis, opened()
    assert tier.store([(key(n), block(n)) for n in range(3)]) == [HIT] * 3
    # As if evicted: only the scan finds the block of this entry.
    own_redis.client.hdel("sightline:kv:sizes:yard", "0:0:1")
    assert tier.list_blocks("yard") == (RETRY, [])
    listed: list[BlockKey] = []

    def complete() -> bool:
        outcome, listed[:] = tier.list_blocks("yard")
        return outcome is HIT

    wait_for(complete)
    assert listed == [key(n) for n in range(3)]
    # Another server's keys are other ones.
    assert tier.list_blocks("yard") == (RETRY, [])
    own_redis.kill()
    own_redis.start(*EVICTING)
    own_redis.client.set("sightline:kv:kv:yard:0:0:9", b"x")
    wait_for(complete)
    assert listed == [key(9)]


def test_a_server_that_refuses_is_up_and_says_why(own_redis: RedisServer, opened: Opened) -> None:
    own_redis.start()
    tier = opened()
    tier.store([(key(1), block(1))])
    own_redis.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert tier.store([(key(2), block(2))]) == [RETRY]
    assert "read only replica" in tier.state().reason
    assert tier.state().up
    assert values(tier, key(1)) == [1.0]
    own_redis.client.execute_command("REPLICAOF", "NO", "ONE")
    assert tier.store([(key(2), block(2))]) == [HIT]
    own_redis.client.set("sightline:kv:sizes:gate", "not a hash")
    assert tier.store([(key(2, "gate"), block(2))]) == [RETRY]
    assert "WRONGTYPE" in tier.state().reason


def test_a_server_in_cluster_mode_says_that_it_is_of_no_use(own_redis: RedisServer, opened: Opened) -> None:
    own_redis.start("--cluster-enabled", "yes", "--cluster-port", str(own_redis.port - 1))
    tier = opened()
    assert tier.store([(key(1), block(1))]) == [RETRY]
    assert tier.state().reason == "the server is in cluster mode, which is not supported (tiers.redis_url)"


def test_after_a_failover_the_new_primary_is_written(
    own_redis: RedisServer, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_redis.start()
    promoted = RedisServer(tmp_path)
    promoted.start()
    primary, find = own_redis, socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *more: find("127.0.0.1", primary.port, *more))
    tier = opened(url="redis://redis.city:6379/0")
    assert tier.store([(key(1), block(1))]) == [HIT]
    own_redis.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    primary = promoted
    try:
        assert tier.store([(key(2), block(2))]) == [RETRY]
        assert tier.store([(key(2), block(2))]) == [HIT]
        assert promoted.names()
    finally:
        promoted.kill()


@pytest.mark.parametrize("given", [":wrong@", ""])
def test_a_wrong_password_is_down_and_is_not_repeated(given: str, own_redis: RedisServer, opened: Opened) -> None:
    own_redis.client.connection_pool.connection_kwargs["password"] = "right"
    own_redis.start("--requirepass", "right")
    tier = opened(url=own_redis.url.replace("redis://", f"redis://{given}"))
    assert tier.store([(key(1), block(1))]) == [RETRY]
    state = tier.state()
    assert not state.up
    assert state.reason == "the server does not accept the user and password in tiers.redis_url, or requires them"
    right = opened(url=own_redis.url.replace("redis://", "redis://:right@"))
    assert right.store([(key(1), block(1))]) == [HIT]


def test_after_close_all_is_refused_and_no_thread_is_left(own_redis: RedisServer, opened: Opened) -> None:
    tier = opened()
    tier.close()
    tier.close()
    assert tier.store([(key(1), block(1))]) == [RETRY]
    assert tier.state().reason == "closed"
    assert not [thread for thread in threading.enumerate() if thread.name == "redis-probe"]


def test_a_stack_above_it_deletes_what_it_was_told_to(own_redis: RedisServer, opened: Opened) -> None:
    own_redis.start()
    tier = opened()
    host = Arena(1 << 20, slab_bytes=1 << 16)
    stack = TierStack([host, tier])
    stack.store([(key(n, name), block(n)) for n in range(4) for name in ("yard", "gate")])
    own_redis.freeze()
    assert stack.store([(key(9), block(9))]) == [RETRY]
    assert stack.drop("gate") is None
    assert drop_everywhere(stack, "yard", [key(1)]) is None
    assert stack.put_manifest("yard", b"late") is RETRY
    assert values(stack, key(0), key(1), key(2, "gate")) == [0.0, RETRY, MISS]
    own_redis.thaw()
    wait_for(lambda: tier.state().up)
    assert values(stack, key(3, "gate")) == [MISS]
    stack.finish_deletions()
    assert stack.deleting == frozenset()
    assert drop_everywhere(stack, "yard", [key(1)]) == 1
    names = {name for name in own_redis.names() if ":kv:kv:" in name}
    # The server may have stored, while it was frozen, what nobody heard of.
    assert names - {"sightline:kv:kv:yard:0:0:9"} == {f"sightline:kv:kv:yard:0:0:{n}" for n in (0, 2, 3)}
    assert stack.lowest.limit == 1 << 26
