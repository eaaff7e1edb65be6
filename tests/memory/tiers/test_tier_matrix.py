"""Every KV tier of the registry, opened as a replica opens it, keeps the same promises."""

import pytest
from kv_parts import block, key, outcomes, same, serving

from cluster.lab.bench.node import FINGERPRINT
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Outcome, TierSettings
from cluster.registry import tiers


@pytest.fixture(scope="module")
def node_address():
    with serving(Arena(2**24, name="node", evicts=False), fingerprint=FINGERPRINT) as node:
        yield node.address


@pytest.fixture(params=tiers.names())
def tier(request, redis_server, node_address):
    settings = TierSettings(
        fingerprint=FINGERPRINT,
        host_bytes=2**24,
        node_bytes=2**24,
        node_address=node_address,
        redis_url=redis_server.url,
    )
    opened = tiers.get(request.param).from_settings(settings)
    yield opened
    for camera in ("gate", "yard"):
        opened.drop(camera)
    opened.close()


def test_blocks_and_manifests_come_back_as_they_were_stored(tier):
    items = [(key(number, stream=camera), block(number)) for camera in ("gate", "yard") for number in range(3)]
    assert tier.store(items) == [Outcome.HIT] * 6
    assert outcomes(tier, [key(2), key(9)]) == [Outcome.HIT, Outcome.MISS]
    loaded = tier.load([name for name, _ in reversed(items)])
    assert all(same(one.block, sent) for one, (_, sent) in zip(loaded, reversed(items), strict=True))
    assert tier.load([key(9)])[0].outcome is Outcome.MISS
    assert tier.put_manifest("gate", b"first") is tier.put_manifest("gate", b"second") is Outcome.HIT
    assert tier.manifest("gate") == (Outcome.HIT, b"second")
    assert tier.manifest("yard") == (Outcome.MISS, None)
    found, keys = tier.list_blocks("gate")
    assert (found, sorted(keys)) == (Outcome.HIT, [key(number) for number in range(3)])
    assert tier.nbytes("gate") >= sum(part.nbytes for _, part in items[:3])
    assert tier.state().up


def test_dropping_takes_what_was_named_and_nothing_else(tier):
    items = [(key(number, stream=camera), block(number)) for camera in ("gate", "yard") for number in range(3)]
    tier.store(items)
    tier.put_manifest("gate", b"of the gate")
    assert tier.drop("gate", [key(1)]) == 1
    assert outcomes(tier, [key(number) for number in range(3)]) == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
    assert tier.drop("gate") == 2
    assert tier.manifest("gate") == (Outcome.MISS, None)
    assert tier.nbytes("gate") == 0
    assert tier.list_blocks("yard")[1]
    assert tier.drop("nobody") == 0


def test_a_cameras_cap_is_never_exceeded(tier):
    one = block(0, tokens=64, width=64)
    tier.set_cap("gate", 3 * one.nbytes)
    for number in range(8):
        tier.store([(key(number), block(number, tokens=64, width=64))])
        assert tier.nbytes("gate") <= 3 * one.nbytes
    assert tier.store([(key(99), block(99, tokens=512, width=64))]) == [Outcome.MISS]
