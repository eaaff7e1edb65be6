"""What callers without a token hold: the oldest of whoever holds most goes."""

import random

from cluster.security.limits import AnonymousPool


def test_the_oldest_of_whoever_has_most_goes():
    pool: AnonymousPool[str] = AnonymousPool(4)
    for item, peer in (("a", "x"), ("b", "y"), ("c", "y"), ("d", "z")):
        assert pool.add(item, peer) is None
    assert pool.add("e", "x") == "b", "y had two"
    assert pool.add("f", "z") == "a", "x had two by then"
    assert [item in pool for item in "abcdef"] == [False, False, True, True, True, True]
    pool.discard("c")
    pool.discard("c")
    assert len(pool._held) == 3
    assert pool.add("g", "y") is None
    assert pool.add("h", "new") == "d", "z had two; who comes for the first time pushes nobody else out but them"


def test_whoever_comes_often_pushes_out_nobody_else():
    """By the rule as it is said, over lists."""
    draw, pool, held = random.Random(3), AnonymousPool(16), []
    for number in range(500):
        peer = draw.choice(["crowd", "crowd", "crowd", "one", "two"])
        expected = None
        if len(held) == 16:
            counts = {who: sum(peer == who for _, peer in held) for _, who in held}
            evicted = pool.add(number, peer)
            assert counts[next(who for item, who in held if item == evicted)] == max(counts.values())
            expected = next(pair for pair in held if pair[0] == evicted)
            assert all(pair[1] != expected[1] for pair in held[: held.index(expected)]), "the oldest of that peer"
            held.remove(expected)
        else:
            assert pool.add(number, peer) is None
        held.append((number, peer))
        if draw.random() < 0.2:
            gone = held.pop(draw.randrange(len(held)))
            pool.discard(gone[0])
        assert len(pool._held) == len(held) <= 16
