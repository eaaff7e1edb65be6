"""A tier in a real Redis server: what it holds, and that its bookkeeping is true."""

import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_server import RedisServer

from cluster.errors import ConfigError
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.codec import Codec
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.stack import TierStack

HIT, MISS, RETRY = Outcome.HIT, Outcome.MISS, Outcome.RETRY


def key(number: int, stream: str = "yard") -> BlockKey:
    return BlockKey(stream, 1, 2, number)


def block(fill: float, count: int = 4, width: int = 8) -> Block:
    kv = torch.full((count, width), float(fill))
    return Block(kv, -kv, *torch.zeros(2, count, dtype=torch.int32))


SIZE = len(Codec("m").encode(key(0), block(0))) + 2 * len("sightline:kv:kv:yard:1:2:0")


def redis_tier(server: RedisServer, **options: object) -> RedisTier:
    settings = {"fingerprint": "m", "cap_bytes": 1 << 24, "ttl_s": 100, "deadline_s": 3.0, **options}
    return RedisTier(server.url, **settings)  # type: ignore[arg-type]


@pytest.fixture
def tier(redis_server: RedisServer) -> Iterator[RedisTier]:
    made = redis_tier(redis_server)
    yield made
    made.close()


def values(tier: RedisTier, *keys: BlockKey) -> list[float | Outcome]:
    loaded = tier.load(keys)
    return [each.outcome if each.block is None else round(float(each.block.key[0, 0]), 4) for each in loaded]


def written_down(server: RedisServer, stream: str = "yard") -> dict[str, int]:
    """The hash of sizes, and that it is true: the value, and its name twice."""
    sizes = {name.decode(): int(size) for name, size in server.client.hgetall(f"sightline:kv:sizes:{stream}").items()}
    names = {
        name: f"sightline:kv:manifest:{stream}" if name == "manifest" else f"sightline:kv:kv:{stream}:{name}"
        for name in sizes
    }
    assert sizes == {field: server.client.strlen(name) + 2 * len(name) for field, name in names.items()}
    return sizes


def test_what_comes_out_is_what_went_in(redis_server: RedisServer) -> None:
    tier = redis_tier(redis_server)
    assert tier.store([(key(n), block(n)) for n in range(3)] + [(key(0, "gate"), block(7))]) == [HIT] * 4
    assert values(tier, key(2), key(9), key(0, "gate"), key(2)) == [2.0, MISS, 7.0, 2.0]
    assert tier.store([(key(1), block(5))]) == [HIT]
    assert values(tier, key(1)) == [5.0]
    assert sum(written_down(redis_server).values()) == tier.nbytes("yard")
    assert tier.nbytes() == tier.nbytes("yard") + tier.nbytes("gate")
    tier.close()


def test_large_batches_go_in_pieces(redis_server: RedisServer) -> None:
    tier = redis_tier(redis_server, batch_bytes=4096, deadline_s=20.0)
    many = [(key(n), block(n)) for n in range(100)] + [(key(100), block(100, count=500))]
    assert tier.store(many) == [HIT] * 101
    assert values(tier, *(name for name, _ in many)) == [float(n) for n in range(101)]
    assert len(written_down(redis_server)) == 101
    calls = redis_server.client.info("commandstats")
    # 401 bytes a block: ten in a piece, and the large one by itself.
    assert calls["cmdstat_exec"]["calls"] >= 11
    assert calls["cmdstat_mget"]["calls"] >= 11
    tier.close()


def test_the_cap_is_counted_in_stored_bytes_and_nothing_older_stays(redis_server: RedisServer) -> None:
    tier = redis_tier(redis_server, cap_bytes=3 * SIZE + 10)
    assert tier.store([(key(n), block(n)) for n in range(4)]) == [HIT, HIT, HIT, RETRY]
    assert tier.store([(key(0), block(10))]) == [HIT]
    assert tier.store([(key(0, "gate"), block(1))]) == [HIT]
    assert tier.store([(key(1), block(11, count=9))]) == [RETRY]
    assert tier.store([(key(2), block(12, count=100))]) == [MISS]
    assert values(tier, key(0), key(1), key(2), key(3)) == [10.0, MISS, MISS, MISS]
    assert written_down(redis_server) == {"1:2:0": SIZE}
    tier.set_cap("yard", SIZE)
    assert tier.store([(key(5), block(5))]) == [RETRY]
    tier.set_cap("yard", 2**30)
    assert tier.store([(key(5), block(5))]) == [HIT]
    assert tier.cap("yard") == 3 * SIZE + 10
    tier.close()


def test_after_a_drop_no_key_of_the_stream_exists(tier: RedisTier, redis_server: RedisServer) -> None:
    tier.store([(key(n, name), block(n)) for n in range(600) for name in ("yard", "yard:1")])
    tier.put_manifest("yard", b"there")
    outcome, listed = tier.list_blocks("yard")
    assert (outcome, sorted(listed)) == (HIT, [key(n) for n in range(600)])
    assert tier.drop("yard", [key(0), key(0), key(1), key(900)]) == 2
    assert len(written_down(redis_server)) == 599
    assert tier.drop("yard") == 598
    assert tier.nbytes("yard") == 0
    assert tier.manifest("yard") == (MISS, None)
    kept = {f"sightline:kv:kv:yard:1:1:2:{n}" for n in range(600)}
    assert redis_server.names() == kept | {"sightline:kv:sizes:yard:1"}
    assert len(written_down(redis_server, "yard:1")) == 600
    assert tier.drop("yard") == 0


def test_who_takes_a_stream_over_finds_all_of_it(tier: RedisTier, redis_server: RedisServer) -> None:
    other = redis_tier(redis_server)
    assert other.nbytes("yard") == 0
    tier.store([(key(n), block(n)) for n in range(5)])
    tier.put_manifest("yard", b"where all is")
    assert other.manifest("yard") == (HIT, b"where all is")
    manifest = redis_server.client.strlen("sightline:kv:manifest:yard") + 2 * len("sightline:kv:manifest:yard")
    assert other.nbytes("yard") == tier.nbytes("yard") == 5 * SIZE + manifest
    assert values(other, key(3)) == [3.0]
    assert other.drop("yard") == 5
    assert not redis_server.names()
    assert values(tier, key(3)) == [MISS]
    other.close()


def test_who_had_a_stream_once_deletes_what_others_have_written_since(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    other = redis_tier(redis_server)
    tier.store([(key(0), block(0))])
    assert other.manifest("yard") == (MISS, None)
    other.store([(key(n), block(n)) for n in range(1, 4)])
    other.put_manifest("yard", b"of the other")
    assert tier.drop("yard") == 4
    assert not redis_server.names()
    # Without a search, where there is nothing.
    assert tier.nbytes("yard") == 0
    other.manifest("yard")
    other.store([(key(9), block(9))])
    TierStack([tier]).clear("yard")
    assert not redis_server.names()
    other.close()


def test_blocks_live_as_long_as_their_stream_is_saved(tier: RedisTier, redis_server: RedisServer) -> None:
    tier.store([(key(n), block(n)) for n in range(3)])
    names = [name for name in redis_server.names() if ":kv:kv:" in name]
    for name in names:
        assert 0 < redis_server.client.ttl(name) <= 100
    # A second owner does not know when they were written: all are due.
    other = redis_tier(redis_server, ttl_s=1000)
    other.put_manifest("yard", b"")
    for name in redis_server.names():
        assert redis_server.client.ttl(name) > 900
    for name in names:
        redis_server.client.expire(name, 50)
    other.put_manifest("yard", b"")
    assert redis_server.client.ttl(names[0]) <= 50
    other.close()


def test_blocks_found_on_a_server_are_renewed_however_short_this_machine_has_run(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    tier.store([(key(n), block(n)) for n in range(3)])
    # Half a time to live before now, this machine was not running.
    other = redis_tier(redis_server, ttl_s=3 * time.monotonic() + 1000)
    other.renew("yard")
    for name in redis_server.names():
        assert redis_server.client.ttl(name) > 900
    other.close()


def test_a_full_server_renews_what_it_holds(own_redis: RedisServer) -> None:
    own_redis.start()
    first, second = (redis_tier(own_redis, ttl_s=ttl_s) for ttl_s in (100, 1000))
    assert first.store([(key(0), block(0))]) == [HIT]
    assert first.put_manifest("yard", b"") is HIT
    own_redis.client.config_set("maxmemory", 1)
    assert second.store([(key(1), block(1))]) == [RETRY]
    second.renew("yard")
    assert "full" in second.state().reason
    assert len(own_redis.names()) == 3
    for name in own_redis.names():
        assert own_redis.client.ttl(name) > 900
    for each in (first, second):
        each.close()


def test_what_expired_is_a_miss_and_is_not_counted_any_more(tier: RedisTier, redis_server: RedisServer) -> None:
    tier.store([(key(n), block(n)) for n in range(3)])
    redis_server.client.delete("sightline:kv:kv:yard:1:2:1")
    assert tier.nbytes("yard") == 3 * SIZE
    assert values(tier, key(1)) == [MISS]
    assert tier.nbytes("yard") == 2 * SIZE
    assert tier.store([(key(4), block(4))]) == [HIT]
    assert set(written_down(redis_server)) == {"1:2:0", "1:2:2", "1:2:4"}


@pytest.mark.parametrize("harm", ["cut", "bit", "text", "other key", "other model"])
def test_a_value_that_is_not_the_block_is_a_miss(tier: RedisTier, redis_server: RedisServer, harm: str) -> None:
    tier.store([(key(n), block(n)) for n in range(3)])
    name = "sightline:kv:kv:yard:1:2:1"
    value = redis_server.client.get(name)
    harmed = {
        "cut": value[:-1],
        "bit": value[:200] + bytes([value[200] ^ 4]) + value[201:],
        "text": b"hello",
        "other key": redis_server.client.get("sightline:kv:kv:yard:1:2:2"),
        "other model": Codec("m2").encode(key(1), block(1)),
    }[harm]
    redis_server.client.set(name, harmed)
    assert values(tier, key(0), key(1), key(2)) == [0.0, MISS, 2.0]
    counts = tier.state().counts
    foreign = harm == "other model"
    assert (counts.get("foreign", 0), counts.get("damaged", 0)) == ((1, 0) if foreign else (0, 1))
    tier.put_manifest("yard", b"")
    # Damage is cleared away; another model's block may be in use by others until this stream is dropped.
    assert bool(redis_server.client.exists(name)) == foreign
    assert tier.store([(key(1), block(9))]) == [HIT]
    assert values(tier, key(1)) == [9.0]


def test_a_manifest_of_another_model_or_damaged_is_none(tier: RedisTier, redis_server: RedisServer) -> None:
    other = redis_tier(redis_server, fingerprint="m2")
    other.put_manifest("yard", b"theirs")
    assert tier.manifest("yard") == (MISS, None)
    assert tier.state().counts["foreign"] == 1
    redis_server.client.append("sightline:kv:manifest:yard", b"!")
    assert other.manifest("yard") == (MISS, None)
    assert other.state().counts["damaged"] == 1
    other.close()


def test_the_cap_counts_the_manifest_and_one_that_does_not_fit_replaces_nothing(redis_server: RedisServer) -> None:
    # Header, length of the fingerprint and "m": 25 bytes beside the manifest and its name.
    framing = 25 + 2 * len("sightline:kv:manifest:yard")
    tier = redis_tier(redis_server, cap_bytes=2 * SIZE + 1000)
    assert tier.put_manifest("yard", bytes(1000 - framing)) is HIT
    assert tier.store([(key(n), block(n)) for n in range(3)]) == [HIT, HIT, RETRY]
    assert tier.nbytes("yard") == sum(written_down(redis_server).values()) == 2 * SIZE + 1000
    assert tier.put_manifest("yard", bytes(1001 - framing)) is RETRY
    assert "does not fit" in tier.state().reason
    assert tier.put_manifest("yard", bytes(2 * SIZE + 1001 - framing)) is MISS
    assert tier.state().counts["too_large"] == 1
    assert tier.manifest("yard") == (HIT, bytes(1000 - framing))
    assert tier.put_manifest("yard", bytes(10)) is HIT
    assert tier.state().reason == ""
    tier.close()


def test_a_camera_may_have_less_than_the_configured_cap_and_never_more(redis_server: RedisServer) -> None:
    tier = redis_tier(redis_server, cap_bytes=2 * SIZE)
    tier.set_cap("yard", 64 * SIZE)
    tier.set_cap("gate", SIZE)
    assert (tier.cap("yard"), tier.cap("gate")) == (2 * SIZE, SIZE)
    assert tier.store([(key(n), block(n)) for n in range(3)]) == [HIT, HIT, RETRY]
    assert tier.store([(key(n, "gate"), block(n)) for n in range(2)]) == [HIT, RETRY]
    tier.close()


SECRET = b"known to the processes of the cluster"


@pytest.mark.parametrize("forger", [b"", b"another secret"])
def test_what_somebody_else_wrote_into_the_server_is_a_miss(redis_server: RedisServer, forger: bytes) -> None:
    """The forger knows format, names and fingerprint, and not the secret."""
    tier = redis_tier(redis_server, secret=SECRET)
    tier.store([(key(1), block(1)), (key(2), block(2))])
    tier.put_manifest("yard", b"ours")
    forged = Codec("m", forger).encode(key(1), block(66))
    redis_server.client.set("sightline:kv:kv:yard:1:2:1", forged)
    redis_server.client.set("sightline:kv:manifest:yard", Codec("m", forger).encode_manifest("yard", b"theirs"))
    assert values(tier, key(1), key(2)) == [MISS, 2.0]
    assert tier.manifest("yard") == (MISS, None)
    assert tier.state().counts["damaged"] == 2
    # It makes way for what is ours.
    assert tier.store([(key(1), block(3))]) == [HIT]
    assert tier.put_manifest("yard", b"ours again") is HIT
    assert values(tier, key(1)) == [3.0]
    assert tier.manifest("yard") == (HIT, b"ours again")
    tier.close()


def test_what_is_ours_is_nothing_under_another_name(redis_server: RedisServer) -> None:
    tier = redis_tier(redis_server, secret=SECRET)
    other = redis_tier(redis_server, secret=SECRET, fingerprint="m2")
    tier.store([(key(1), block(1)), (key(1, "gate"), block(7))])
    tier.put_manifest("yard", b"of the yard")
    client, prefix = redis_server.client, "sightline:kv:kv"
    for name in ("yard:1:2:9", "yard:1:3:1", "yard:2:2:1", "gate:1:2:1"):
        client.set(f"{prefix}:{name}", client.get(f"{prefix}:yard:1:2:1"))
    client.set("sightline:kv:manifest:gate", client.get("sightline:kv:manifest:yard"))
    replayed = [key(9), BlockKey("yard", 1, 3, 1), BlockKey("yard", 2, 2, 1), key(1, "gate")]
    assert values(tier, *replayed) == [MISS] * 4
    assert tier.manifest("gate") == (MISS, None)
    assert tier.state().counts["damaged"] == 5
    assert values(other, key(1)) == [MISS]
    assert other.state().counts["foreign"] == 1
    tier.close()
    other.close()


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from("sssldDxmo"), st.integers(0, 1), st.integers(0, 5), st.integers(1, 9)), max_size=25
    )
)
def test_the_hash_names_every_block_there_is(shared_redis: RedisServer, steps: list[tuple[str, int, int, int]]) -> None:
    shared_redis.client.flushall()
    cap = 8 * SIZE
    tier = redis_tier(shared_redis, cap_bytes=cap, batch_bytes=2 * SIZE)
    wanted: dict[BlockKey, float] = {}
    for turn, (what, stream, number, count) in enumerate(steps):
        name = key(number, "ab"[stream])
        if what == "s":
            items = [(key(n, name.stream), block(turn, count)) for n in range(number, 6)]
            for (stored, _), outcome in zip(items, tier.store(items), strict=True):
                wanted.pop(stored, None)
                if outcome is HIT:
                    wanted[stored] = float(turn)
        elif what in "dD":
            tier.drop(name.stream, [name] if what == "d" else None)
            wanted = {k: v for k, v in wanted.items() if (k.stream != name.stream if what == "D" else k != name)}
        elif what == "x":
            # As the server does that evicts or lets expire.
            shared_redis.client.delete(f"sightline:kv:kv:{name.stream}:1:2:{number}")
            wanted.pop(name, None)
        elif what == "m":
            tier.put_manifest(name.stream, b"")
        elif what == "o":
            tier.close()
            tier = redis_tier(shared_redis, cap_bytes=cap, batch_bytes=2 * SIZE)
        every = [key(n, s) for s in "ab" for n in range(6)]
        if what == "l":
            assert values(tier, *every) == [wanted.get(each, MISS) for each in every]
        for s in "ab":
            sizes = shared_redis.client.hgetall(f"sightline:kv:sizes:{s}")
            there = {each for each in every if each.stream == s and each in wanted}
            assert {f"1:2:{each.block}".encode() for each in there} <= set(sizes)
            names = [f"sightline:kv:kv:{s}:1:2:{each.block}" for each in there]
            held = sum(shared_redis.client.strlen(name) + 2 * len(name) for name in names)
            assert held <= sum(map(int, sizes.values())) <= cap
            assert held <= tier.nbytes(s) <= cap
        names = {name for name in shared_redis.names() if ":kv:kv:" in name}
        assert names == {f"sightline:kv:kv:{each.stream}:1:2:{each.block}" for each in wanted}
    tier.close()


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("http://user:secret@host", {}, "redis://host:6379/0"),
        ("rediss://:secret@127.0.0.1:1?ssl_ca_cert=/etc/ca.pem", {}, "ssl_ca_certs=FILE"),
        ("rediss://:secret@127.0.0.1:1?ssl_cert_reqs=whatever", {}, "ssl_ca_certs=FILE"),
        ("redis://127.0.0.1:1", {"fingerprint": ""}, "fingerprint"),
    ],
)
def test_settings_that_cannot_work_are_refused(url: str, options: dict[str, object], said: str) -> None:
    settings = {"fingerprint": "m", "cap_bytes": 1024, "ttl_s": 100, **options}
    with pytest.raises(ConfigError, match=said) as caught:
        RedisTier(url, **settings)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
