"""An arena: what it holds, what it gives up for what, and that its caps are real."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.slabs import Slabs

HIT, MISS, RETRY = Outcome.HIT, Outcome.MISS, Outcome.RETRY
WIDTH = 4


def key(number: int, stream: str = "yard") -> BlockKey:
    return BlockKey(stream, 0, 0, number)


def block(count: int, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> Block:
    """Takes ``40 * count`` bytes in float32."""
    places = torch.arange(count, dtype=torch.int32)
    kv = torch.full((count, WIDTH), fill, dtype=dtype)
    return Block(kv, -kv, places, places + 1)


def arena(total: int = 8192, slab: int = 2048, **options: object) -> Arena:
    """Slabs of eight cells of 256 bytes; what is larger than a cell is rounded up to 4 KiB."""
    return Arena(total, slab_bytes=slab, **options)  # type: ignore[arg-type]


def held(tier: Arena, *keys: BlockKey) -> list[bool]:
    return [found is HIT for found in tier.lookup(keys)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 3, 7, 300])
def test_what_comes_out_is_what_went_in(dtype: torch.dtype, count: int) -> None:
    tier = arena(1 << 20)
    assert tier.store([(key(1), block(count, 0.5, dtype)), (key(2), block(2))]) == [HIT, HIT]
    found = tier.load([key(3), key(1)])
    assert [each.outcome for each in found] == [MISS, HIT]
    got, want = found[1].block, block(count, 0.5, dtype)
    assert got is not None
    assert got.key.dtype == dtype
    assert got.frame.dtype == got.cell.dtype == torch.int32
    for name in ("key", "value", "frame", "cell"):
        assert torch.equal(getattr(got, name), getattr(want, name))


def test_a_loaded_block_outlives_what_takes_its_place() -> None:
    tier = arena(2048, stream_bytes=256)
    tier.store([(key(1), block(2, 1.0))])
    mine = tier.load([key(1)])[0].block
    tier.store([(key(2), block(2, 2.0))])
    assert held(tier, key(1), key(2)) == [False, True]
    assert mine is not None
    assert mine.key.eq(1.0).all()


def test_the_longest_unused_block_of_the_stream_goes_first() -> None:
    tier = arena(stream_bytes=3 * 256)
    tier.store([(key(n), block(1)) for n in (1, 2, 3)] + [(key(9, "gate"), block(1))])
    tier.load([key(1)])
    assert tier.store([(key(4), block(1))]) == [HIT]
    assert held(tier, key(1), key(2), key(3), key(4), key(9, "gate")) == [True, False, True, True, True]
    assert tier.nbytes("yard") == 3 * 256
    assert tier.nbytes() == 4 * 256
    assert tier.state().counts["evicted"] == 1


def test_a_full_arena_takes_from_the_stream_furthest_above_its_share() -> None:
    tier = arena(2048)
    tier.set_cap("yard", 512)
    tier.set_cap("lane", 512)
    # Eight cells; the shares are 8/6 for each of two streams at one cap, and 4 times that for the gate.
    tier.store([(key(n, "yard"), block(1)) for n in range(2)])
    tier.store([(key(n, "lane"), block(1)) for n in range(1)])
    tier.store([(key(n, "gate"), block(1)) for n in range(5)])
    assert tier.store([(key(7, "lane"), block(1))]) == [HIT]
    assert [tier.nbytes(name) // 256 for name in ("yard", "lane", "gate")] == [1, 2, 5]
    assert held(tier, key(0, "yard"), key(1, "yard")) == [False, True]


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(8, 32), min_size=1),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("sssld"), st.integers(0, 40)), max_size=120),
)
def test_every_eviction_of_a_full_arena_is_of_who_uses_most_of_its_cap(
    caps: dict[str, int], steps: list[tuple[str, str, int]]
) -> None:
    tier = arena(4096)
    for stream, cells in caps.items():
        tier.set_cap(stream, 256 * cells)
    for turn, (stream, what, number) in enumerate(steps):
        before = {name: tier.nbytes(name) for name in "abcdef"}
        evicted = tier.state().counts.get("evicted", 0)
        if what == "l":
            tier.set_cap(stream, 256 * (8 + number))
        elif what == "d":
            tier.drop(stream, [key(number - 1, stream), key(number, stream)])
        elif before[stream] < tier.cap(stream):
            tier.store([(key(100 + turn, stream), block(1))])
            if tier.state().counts.get("evicted", 0) > evicted:
                gone = [name for name in "abcdef" if tier.nbytes(name) < before[name] + 256 * (name == stream)]
                most = max(before[name] / tier.cap(name) for name in "abcdef")
                assert [before[name] / tier.cap(name) for name in gone] == [most]


def test_who_evicts_is_found_among_a_few_streams_however_many_there_are() -> None:
    class Counted(Arena):
        looked = 0

        def cap(self, stream: str) -> int:
            self.looked += 1
            return super().cap(stream)

    streams, turns = 1000, 3000
    tier = Counted(1 << 18, slab_bytes=2048)
    for number in range(streams):
        tier.set_cap(f"camera-{number}", (1 + number % 7) << 14)
    for turn in range(2000):
        tier.store([(key(turn, f"camera-{turn % streams}"), block(1))])
    assert len([name for name in range(streams) if tier.nbytes(f"camera-{name}")]) > streams // 2
    tier.looked, evicted = 0, tier.state().counts["evicted"]
    for turn in range(2000, 2000 + turns):
        tier.store([(key(turn, f"camera-{turn * 7 % streams}"), block(1))])
    assert tier.state().counts["evicted"] - evicted == turns
    assert tier.looked < 8 * turns


def test_streams_without_anything_leave_nothing_behind() -> None:
    tier = arena(2048, stream_bytes=512)
    for number in range(300):
        stream = f"camera-{number}"
        tier.store([(key(n, stream), block(1)) for n in range(3)])
        tier.put_manifest(stream, bytes(9000))
        tier.drop(stream, [key(n, stream) for n in range(3)])
        assert tier.put_manifest(stream, b"there") is HIT
        tier.drop(stream)
    assert tier.nbytes() == len(tier._streams) == 0
    assert len(tier._ranked) < 100


def test_the_lowest_tier_refuses_and_keeps_what_it_has() -> None:
    tier = arena(2048, evicts=False)
    assert tier.store([(key(n), block(1)) for n in range(9)]) == [HIT] * 8 + [RETRY]
    assert tier.store([(key(0, "gate"), block(1))]) == [RETRY]
    assert all(held(tier, *(key(n) for n in range(8))))
    assert set(tier.list_blocks("yard")[1]) >= {key(3)}
    assert tier.drop("yard", [key(3)]) == 1
    assert tier.store([(key(0, "gate"), block(1))]) == [HIT]
    capped = arena(2048, evicts=False, stream_bytes=512)
    assert capped.store([(key(n), block(1)) for n in range(3)]) == [HIT, HIT, RETRY]


def test_what_is_larger_than_its_cap_can_never_be_held() -> None:
    tier = arena(stream_bytes=1024)
    assert tier.store([(key(1), block(200))]) == [MISS]
    assert arena(2048).store([(key(1), block(200))]) == [MISS]
    # ... and what it was to replace is not given out any more.
    tier.store([(key(1), block(1))])
    assert tier.store([(key(1), block(200))]) == [MISS]
    assert held(tier, key(1)) == [False]


def test_a_batch_that_evicts_its_own_says_so() -> None:
    tier = arena(stream_bytes=512)
    assert tier.store([(key(n), block(1)) for n in range(3)]) == [RETRY, HIT, HIT]


def test_a_lower_cap_evicts_at_once() -> None:
    tier = arena()
    tier.store([(key(n), block(1)) for n in range(4)])
    tier.set_cap("yard", 512)
    assert held(tier, *(key(n) for n in range(4))) == [False, False, True, True]


def test_dropping_forgets_blocks_and_manifest_of_one_stream() -> None:
    tier = arena()
    tier.store([(key(n), block(1)) for n in range(3)] + [(key(0, "gate"), block(1))])
    assert tier.put_manifest("yard", b"there") is HIT
    assert tier.manifest("yard") == (HIT, b"there")
    assert tier.drop("yard", [key(1), key(1), key(7)]) == 1
    assert tier.manifest("yard") == (HIT, b"there")
    assert tier.drop("yard") == 2
    assert tier.drop("yard") == 0
    assert tier.manifest("yard") == (MISS, None)
    assert tier.nbytes("yard") == 0
    assert held(tier, key(0), key(0, "gate")) == [False, True]


def test_the_cap_counts_the_manifest_and_one_that_does_not_fit_replaces_nothing() -> None:
    tier = arena(stream_bytes=4 * 256)
    assert tier.put_manifest("yard", b"x" * 256) is HIT
    assert tier.nbytes("yard") == tier.nbytes() == 256
    assert tier.store([(key(n), block(1)) for n in range(4)]) == [RETRY, HIT, HIT, HIT]
    assert tier.nbytes("yard") == 4 * 256
    # One cell more: the longest unused block makes room.
    assert tier.put_manifest("yard", b"y" * 257) is HIT
    assert held(tier, *(key(n) for n in range(1, 4))) == [False, True, True]
    assert tier.put_manifest("yard", b"z" * 1025) is MISS
    assert tier.state().counts["too_large"] == 1
    assert tier.manifest("yard") == (HIT, b"y" * 257)
    assert tier.put_manifest("yard", b"") is HIT
    assert tier.manifest("yard") == (HIT, b"")
    assert tier.drop("yard") == 2
    assert tier.nbytes() == 0
    tier.put_manifest("yard", b"x")
    tier.close()
    assert tier.nbytes() == tier.reserved == 0


def test_a_manifest_takes_the_blocks_that_were_used_longest_ago_and_no_other() -> None:
    tier = arena(8 * 2048, slab=2048)
    # Slab by slab: eight blocks lie in each.
    tier.store([(key(n), block(1)) for n in range(64)])
    tier.load([key(n) for n in range(8, 16)])
    assert tier.put_manifest("gate", bytes(2 * 2048 - 100)) is HIT
    assert held(tier, *(key(n) for n in range(64))) == [n not in {*range(8), *range(16, 24)} for n in range(64)]
    # The next one needs no more room than the last has.
    assert tier.put_manifest("gate", bytes(2 * 2048)) is HIT
    assert tier.state().counts["evicted"] == 16
    assert tier.reserved == 8 * 2048


@pytest.mark.parametrize("what", ["manifest", "block"])
def test_the_first_of_its_size_takes_one_slab_of_a_full_arena_however_its_blocks_were_used(what: str) -> None:
    tier = arena(64 * 4096, slab=4096)
    tier.store([(key(n), block(1)) for n in range(16 * 64)])
    # One block of each slab was used again.
    tier.load([key(n) for n in range(0, 16 * 64, 16)])
    if what == "manifest":
        assert tier.put_manifest("gate", bytes(2000)) is HIT
    else:
        assert tier.store([(key(0, "gate"), block(10))]) == [HIT]
    assert tier.state().counts["evicted"] == 16


def test_a_manifest_without_room_beside_those_of_others_evicts_nothing() -> None:
    tier = arena(8 * 2048)
    assert tier.put_manifest("lane", bytes(5 * 2048)) is HIT
    tier.store([(key(n), block(1)) for n in range(8)])
    assert tier.put_manifest("gate", bytes(4 * 2048)) is RETRY
    assert tier.contents() == (1, 8)


def test_a_lowest_tier_refuses_a_manifest_it_has_no_room_for() -> None:
    tier = arena(2 * 2048, evicts=False)
    tier.store([(key(n), block(1)) for n in range(8)])
    assert tier.put_manifest("gate", b"a" * 2049) is RETRY
    assert tier.put_manifest("gate", b"a" * 1500) is HIT
    # In the place of the last one, though there is no room beside it.
    assert tier.put_manifest("gate", b"b" * 2048) is HIT
    assert tier.put_manifest("gate", b"c" * 2049) is RETRY
    assert tier.manifest("gate") == (HIT, b"b" * 2048)
    assert all(held(tier, *(key(n) for n in range(8))))


def test_a_stream_may_have_less_than_the_cap_of_all_and_never_more() -> None:
    tier = arena(stream_bytes=512)
    tier.set_cap("yard", 8192)
    tier.set_cap("gate", 256)
    assert (tier.cap("yard"), tier.cap("gate")) == (512, 256)
    tier.store([(key(n, name), block(1)) for n in range(4) for name in ("yard", "gate")])
    assert (tier.nbytes("yard"), tier.nbytes("gate")) == (512, 256)


def test_after_close_nothing_is_held() -> None:
    tier = arena()
    tier.store([(key(1), block(1))])
    tier.close()
    tier.close()
    assert tier.store([(key(1), block(1))]) == [RETRY]
    assert tier.load([key(1)])[0].outcome is MISS
    assert tier.put_manifest("yard", b"") is RETRY
    assert tier.reserved == tier.nbytes() == 0
    assert not tier.state().up


def test_a_machine_with_less_memory_than_it_was_said_to_have_is_full() -> None:
    tier = Arena(1 << 60, slab_bytes=1 << 59)
    assert tier.store([(key(1), block(1))]) == [RETRY]
    assert tier.reserved == 0


def test_a_block_of_odd_shapes_takes_nothing() -> None:
    tier, odd = arena(), block(3)
    with pytest.raises(ValueError, match=r"must be \[n, D\]"):
        tier.store([(key(1), Block(odd.key, odd.value[:2], odd.frame, odd.cell))])
    assert tier.nbytes() == tier.reserved == 0


def test_a_size_nobody_wants_any_more_gives_its_slabs_to_another() -> None:
    tier = arena(1 << 16, slab=1 << 14)
    tier.store([(key(n), block(1)) for n in range(256)])
    # Three of four slabs: the first 192 of the small ones go, and none of the newcomers.
    assert tier.store([(key(n), block(40)) for n in range(300, 324)]) == [HIT] * 24
    assert all(held(tier, *(key(n) for n in [*range(192, 256), *range(300, 324)])))
    assert tier.state().counts["evicted"] == 192
    assert tier.reserved <= 1 << 16


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 9000)), max_size=60))
def test_cells_never_overlap_and_never_exceed_the_total(steps: list[tuple[bool, int, int]]) -> None:
    slabs = Slabs(1 << 16, slab_bytes=1 << 13, pinned=False)
    cells = {}
    for number, (frees, which, nbytes) in enumerate(steps):
        if frees and cells:
            name = sorted(cells)[which % len(cells)]
            cell, fill = cells.pop(name)
            assert cell.memory.eq(fill).all()
            slabs.free(cell)
        elif (cell := slabs.allocate(nbytes)) is not None:
            assert nbytes <= cell.nbytes <= max(256, nbytes * 1.25 + 64, nbytes + 4096)
            assert cell.nbytes == slabs.cell_bytes(nbytes)
            cell.memory.fill_(number)
            cells[number] = (cell, number)
        assert sum(cell.nbytes for cell, _ in cells.values()) <= slabs.reserved <= 1 << 16
    for cell, fill in cells.values():
        assert cell.memory.eq(fill).all()
        slabs.free(cell)
    slabs.release()
    assert slabs.reserved == 0


@given(
    st.lists(st.tuples(st.sampled_from("sldm"), st.integers(0, 1), st.integers(0, 9), st.integers(0, 60)), max_size=50)
)
def test_never_a_wrong_block_never_above_a_cap(steps: list[tuple[str, int, int, int]]) -> None:
    tier = arena(12288, stream_bytes=6144)
    wanted: dict[BlockKey, tuple[int, float]] = {}
    manifests: dict[str, bytes] = {}
    for turn, (what, stream, number, count) in enumerate(steps):
        name = key(number, "ab"[stream])
        if what == "s":
            outcome = tier.store([(name, block(count, turn))])[0]
            wanted.pop(name, None)
            if outcome is HIT:
                wanted[name] = (count, float(turn))
        elif what == "d":
            tier.drop(name.stream, [name])
            wanted.pop(name, None)
        elif what == "m" and tier.put_manifest(name.stream, bytes(100 * count)) is HIT:
            manifests[name.stream] = bytes(100 * count)
        assert tier.manifest(name.stream)[1] == manifests.get(name.stream)
        found = tier.load([name])[0]
        if found.block is not None:
            size, fill = wanted[name]
            assert len(found.block) == size
            assert found.block.key.eq(fill).all()
            assert found.block.value.eq(-fill).all()
        assert tier.nbytes() == tier.nbytes("a") + tier.nbytes("b") <= tier.reserved <= 12288
        assert max(tier.nbytes("a"), tier.nbytes("b")) <= 6144


def test_many_threads_get_whole_blocks() -> None:
    tier = arena(1 << 14, slab=1 << 12, stream_bytes=1 << 13)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for turn in range(150):
            number = (turn * 7 + seed) % 30
            tier.store([(key(number), block(1 + number, number))])
            for name, found in zip((key(n) for n in range(30)), tier.load([key(n) for n in range(30)]), strict=True):
                if found.block is not None and not (found.block.key == name.block).all():
                    wrong.append(f"{name}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert tier.nbytes() <= 1 << 13


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_of_a_device_come_back_on_the_host() -> None:
    tier = Arena(64 << 20, pinned=True)
    given = [(key(n), block(500, n)) for n in range(20)]
    tier.store([(k, Block(one.key.cuda(), one.value.cuda(), one.frame, one.cell)) for k, one in given])
    for n, found in enumerate(tier.load([key(n) for n in range(20)])):
        assert found.block is not None
        assert found.block.key.device.type == "cpu"
        assert found.block.key.eq(n).all()
        assert found.block.cell.tolist() == list(range(1, 501))
