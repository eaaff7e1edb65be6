"""A stream's memory against a plain list of everything that came in."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_parts import OURS, key_of, remote, serving
from redis_server import RedisServer
from waiting import until

from cluster.errors import NotReadyError, UnavailableError
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.lab.bench.memory.footage import made_chunks
from cluster.memory.bank import MemoryBank
from cluster.memory.compress.infinipot_v import InfiniPotV
from cluster.memory.eviction import compress
from cluster.memory.head_memory import HeadMemory, KVChunk, LayerKV
from cluster.memory.memory_counts import LOST
from cluster.memory.organise import AtHand, NewTokens
from cluster.memory.organise.resv import ReSV
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers import redis_link
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import BlockKey, Loaded, Outcome, Tier, TierState
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.slabs import cell_size
from cluster.memory.tiers.stack import TierStack
from cluster.memory.writer import THREADS, MemoryWriter
from cluster.registry import compressors, organisers
from cluster.types import MICROSECONDS, DeletedMemory, MemorySpec
from cluster.types.cameras import INDEX, WAITING

LAYERS, HEADS, WIDTH, ROWS, COLUMNS = 2, 2, 8, 3, 4
MIB = 2**20


def chunk(number: int, seed: int = 0, tokens: int | None = None, pts: int | None = None) -> KVChunk:
    rng = torch.Generator().manual_seed(seed * 1000 + number)
    count = tokens if tokens is not None else int(torch.randint(1, ROWS * COLUMNS + 1, (1,), generator=rng))
    cell = torch.randperm(ROWS * COLUMNS, generator=rng)[:count].sort().values
    key, value = (torch.randn(LAYERS, HEADS, count, WIDTH, generator=rng) for _ in range(2))
    time = number * MICROSECONDS if pts is None else pts
    return KVChunk("cam", number, time, key, value, cell, ROWS, COLUMNS, torch.randn(6, generator=rng))


def placed(memory: StreamMemory, number: int, second: int, *, restarts: bool = False) -> KVChunk:
    """A frame of the camera's clock, at the time that the memory gives it."""
    return chunk(number, pts=memory.next_time(second * MICROSECONDS, restarts=restarts))


def stack(total: int = 64 * MIB) -> TierStack:
    return TierStack([Arena(total, name="host")])


def spec(**changes: object) -> MemorySpec:
    given_ = {"compressor": "none", "organiser": "resv", "block_frames": 4, "cap_bytes": 32 * MIB, **changes}
    return MemorySpec(**given_)  # type: ignore[arg-type]


def held(memory: StreamMemory) -> dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor]]:
    """(layer, head, frame, cell) -> key and value, read through the tiers as a question would."""
    found = {}
    for number, heads in enumerate(memory.heads):
        for h, head in enumerate(heads):
            table = head.organiser.table
            for cluster in range(len(table)):
                (loaded,) = memory.block_loader(number, h)([key_of(memory, number, h, cluster).block])
                assert loaded.block is not None
                assert len(loaded.block) == int(table.count[cluster])
                for i in range(len(loaded.block)):
                    at = (number, h, int(loaded.block.frame[i]), int(loaded.block.cell[i]))
                    assert at not in found
                    found[at] = (loaded.block.key[i], loaded.block.value[i])
    return found


def expected(chunks: list[KVChunk]) -> dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor]]:
    return {
        (layer, h, each.index, int(cell)): (each.key[layer, h, i], each.value[layer, h, i])
        for each in chunks
        for i, cell in enumerate(each.cell)
        for layer, h in itertools.product(range(LAYERS), range(HEADS))
    }


def same(found: dict, wanted: dict, error: float = 0.1) -> None:  # type: ignore[type-arg]
    """``error``: of normally distributed KV in eight bits, centred and scaled by a few tokens."""
    assert set(found) == set(wanted)
    for at, (key, value) in wanted.items():
        assert float((found[at][0] - key).abs().max()) <= error
        assert float((found[at][1] - value).abs().max()) <= error


@pytest.mark.parametrize(("kv_dtype", "error"), [("int8", 0.1), ("model", 0.0)])
@pytest.mark.parametrize("organiser", organisers.names())
def test_everything_is_held_with_its_own_kv(organiser: str, kv_dtype: str, error: float) -> None:
    memory = StreamMemory("cam", spec(organiser=organiser, kv_dtype=kv_dtype), stack())
    chunks = [chunk(number) for number in range(16)]
    for each in chunks:
        memory.add_chunk(each)
    assert not memory.recent
    same(held(memory), expected(chunks), error)
    assert memory.tokens == len(expected(chunks))
    assert memory.counts.lost == 0


def test_an_open_camera_of_which_nothing_changes_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second, all of its tokens were sorted."""
    memory = StreamMemory("cam", spec(), stack())
    for number in range(8):
        memory.add_chunk(chunk(number))
    assert memory.save() is Outcome.HIT
    monkeypatch.setattr(memory, "_trim_frames", None)
    assert memory.settle(-1)
    assert memory.save(None) is Outcome.HIT
    monkeypatch.undo()
    memory.delete_frames(before_frame=3)
    assert memory.settle(-1)
    assert (memory.frames, memory.oldest) == (5, 3 * MICROSECONDS)


@pytest.mark.parametrize("organiser", organisers.names())
def test_a_gpu_is_asked_for_waiting_frames_once(organiser: str) -> None:
    """Not layer by layer, head by head or block by block: whoever asks waits for all that the GPU was given before."""
    with FakeCuda() as cuda:
        memory = StreamMemory("cam", spec(organiser=organiser), stack())
        for number in range(4):
            here = chunk(number)
            parts = ("key", "value", "cell", "mean_embedding")
            memory.accept_chunk(replace(here, **{name: getattr(here, name).to(DEVICE) for name in parts}))
        cuda.reset()
        assert memory.settle()
        # Keys, values and cells; mosaic looks at each frame.
        assert cuda.syncs == 3 + (4 if organiser == "mosaic" else 0)
    assert not memory.recent
    assert memory.tokens > 0


@pytest.mark.parametrize(
    ("compressor", "organiser"),
    [*((name, "frames") for name in compressors.names() if name != "none"), ("infinipot_v", "mosaic")],
)
def test_the_cap_holds_and_what_is_held_is_right(compressor: str, organiser: str) -> None:
    cap = 64 * 1024
    memory = StreamMemory("cam", spec(compressor=compressor, organiser=organiser, cap_bytes=cap), stack())
    memory.tiers.set_cap("cam", cap)
    chunks = [chunk(number) for number in range(80)]
    for each in chunks:
        memory.add_chunk(each)
        assert memory.tiers.usage("cam")["host"] <= cap
    assert memory.counts.compressions > 0
    assert memory.counts.lost == 0
    found, wanted = held(memory), expected(chunks)
    assert set(found) <= set(wanted)
    same(found, {at: wanted[at] for at in found})
    # Compression keeps a fair part of the room in use.
    assert memory.tiers.usage("cam")["host"] > cap / 4


def test_other_settings_of_keep_thin_every_block() -> None:
    memory = StreamMemory("cam", spec(compressor="sliding", keep=0.5), stack())
    for number in range(8):
        memory.add_chunk(chunk(number, tokens=6))
    assert memory.tokens == LAYERS * HEADS * 8 * 6 // 2
    assert memory.counts.compressed_away == LAYERS * HEADS * 8 * 6 // 2


@pytest.mark.parametrize("organiser", organisers.names())
def test_forgetting_leaves_nothing_older_in_any_tier(organiser: str) -> None:
    memory = StreamMemory("cam", spec(organiser=organiser), stack())
    chunks = [chunk(number) for number in range(14)]
    for each in chunks:
        memory.add_chunk(each)
    memory.delete_frames(before_frame=memory.frames_since(6 * MICROSECONDS))
    same(held(memory), expected(chunks[6:12]))
    assert [each.index for each in memory.recent] == [12, 13]
    assert memory.oldest == 6 * MICROSECONDS
    memory.delete_frames()
    assert memory.tiers.usage("cam") == {"host": 0}
    assert memory.tokens == memory.frames == 0
    memory.add_chunk(chunk(0))
    assert memory.frames == 1


def test_retention_forgets_by_itself() -> None:
    memory = StreamMemory("cam", spec(retention_s=8.0), stack())
    for number in range(40):
        memory.add_chunk(chunk(number))
    assert memory.oldest is not None
    assert memory.oldest >= (39 - 8 - 4) * MICROSECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``hours`` that pass for memories."""
    clock, began = SimpleNamespace(hours=0.0), time.monotonic()
    for module in ("bank", "eviction", "stream"):
        monotonic = SimpleNamespace(monotonic=lambda: began + clock.hours * 3600)
        monkeypatch.setattr(f"cluster.memory.{module}.time", monotonic)
    return clock


def test_retention_applies_while_no_frame_comes(clock: SimpleNamespace) -> None:
    memory = StreamMemory("cam", spec(retention_s=2 * 3600), stack())
    for number in range(10):
        memory.add_chunk(chunk(number, pts=number * 600 * MICROSECONDS))
    clock.hours = 1.5
    assert memory.settle()
    assert memory.save() is Outcome.HIT
    # The newest frame is of 5,400 s.
    assert memory.oldest == 3600 * MICROSECONDS
    memory = StreamMemory("cam", memory.spec, memory.tiers)
    assert memory.restore() is Outcome.HIT
    clock.hours = 3.3
    assert memory.settle()
    # 1.8 h after the restart, 12 min before the newest frame are left.
    assert memory.oldest == 4800 * MICROSECONDS
    clock.hours = 5.0
    assert memory.settle()
    assert memory.frames == memory.tokens == 0
    assert memory.save() is Outcome.HIT
    # And it goes on.
    later = chunk(1, pts=9 * 3600 * MICROSECONDS)
    memory.add_chunk(later)
    memory.settle()
    assert memory.newest == later.pts
    assert memory.tokens == LAYERS * HEADS * later.tokens


def _maintain(*banks: MemoryBank) -> None:
    for bank in banks:
        bank.run_maintenance()
        assert bank.wait_written()


def _released(tier: Tier) -> MemoryBank:
    """A bank that let a camera go: two hours are kept of frames that came at 0, 10 … 90 min, the last of them now."""
    bank = _opened(tier, spec(retention_s=2 * 3600, block_frames=2))
    _feed(bank, [chunk(number, pts=number * 600 * MICROSECONDS) for number in range(10)])
    bank.release_stream("cam")
    assert bank.wait_written()
    return bank


def test_retention_applies_to_a_camera_that_was_let_go(clock: SimpleNamespace) -> None:
    tier = Arena(64 * MIB, name="host", evicts=False)
    bank = _released(tier)
    clock.hours = 0.6
    before = set(tier.list_blocks("cam")[1])
    _maintain(bank)
    assert set(tier.list_blocks("cam")[1]) == before, "the oldest frame is 2.1 hours old: deletion goes in steps"
    clock.hours = 1.5
    _maintain(bank)
    assert not set(tier.list_blocks("cam")[1]) >= before
    memory, _ = bank.get_memory("cam")
    assert (memory.oldest, memory.newest) == (3600 * MICROSECONDS, 5400 * MICROSECONDS)
    assert memory.counts.lost == 0
    assert {at[2] for at in held(memory)} == {6, 7, 8, 9}
    # It lies open for questions, and is one of those that was let go still.
    clock.hours = 3.6
    _maintain(bank)
    assert tier.nbytes("cam") == 0
    assert tier.manifest("cam") == (Outcome.MISS, None)
    assert "cam" not in bank.memory_reports()
    with pytest.raises(NotReadyError):
        bank.get_memory("cam")
    # When the camera is back it remembers again.
    bank.open_stream("cam", spec(retention_s=2 * 3600))
    _feed(bank, [chunk(number, pts=(number + 40) * 600 * MICROSECONDS) for number in range(4)])
    assert bank.get_memory("cam")[0].frames == 4


def test_an_outage_counts_for_the_age_of_what_was_seen_before_it(clock: SimpleNamespace) -> None:
    """Cameras over RTSP count from 0 again: of one that was often away, a retention of two hours kept days."""
    memory = StreamMemory("cam", spec(retention_s=2 * 3600, block_frames=2), stack())
    for minute in range(0, 100, 10):
        clock.hours = minute / 60
        memory.add_chunk(placed(memory, minute, 60 * minute))
    # Away for an hour, then there for 40 minutes.
    for minute in range(0, 50, 10):
        clock.hours = 2.5 + minute / 60
        memory.add_chunk(placed(memory, minute, 60 * minute, restarts=minute == 0))
    assert memory.settle()
    # Three hours and ten minutes after the first one.
    assert [time // (60 * MICROSECONDS) for time in memory.log.times] == [70, 80, 90, 150, 160, 170, 180, 190]
    # It goes on counting while the camera is away again, though the last frame from before came into the memory late.
    clock.hours = 4.4
    memory.add_chunk(placed(memory, 100, 0, restarts=True))
    assert memory.settle()
    assert [time // (60 * MICROSECONDS) for time in memory.log.times] == [150, 160, 170, 180, 190, 264]


@pytest.mark.parametrize(("minutes", "told"), [(400, 80), (81, 81), (-30, 80)])
def test_a_clock_that_jumps_makes_nothing_older(clock: SimpleNamespace, minutes: int, told: int) -> None:
    """Many cameras count from their wall clock, which NTP sets hours ahead after a start; half an hour passes here."""
    memory = StreamMemory("cam", spec(retention_s=2 * 3600, block_frames=2), stack())
    for minute in range(0, 60, 10):
        clock.hours = minute / 60
        memory.add_chunk(placed(memory, minute, 60 * minute))
    clock.hours = 80 / 60
    for number in range(60, 62):
        memory.add_chunk(placed(memory, number, 60 * minutes + number - 60, restarts=number == 60))
    assert memory.settle()
    assert [time // (60 * MICROSECONDS) for time in memory.log.times] == [0, 10, 20, 30, 40, 50, told, told]


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_camera_that_is_back_is_as_old_as_it_was(clock: SimpleNamespace, rewritten: bool) -> None:
    """Pausing a camera made nothing of it younger; what another process has written since is not older for it."""
    tier = Arena(64 * MIB, name="host", evicts=False)
    bank = _released(tier)
    if rewritten:
        other = _opened(tier, spec(retention_s=2 * 3600, block_frames=2))
        clock.hours = 1.4
        _feed(other, [chunk(10, pts=6000 * MICROSECONDS)])
        other.release_stream("cam")
        assert other.wait_written()
    clock.hours = 1.5
    bank.open_stream("cam", spec(retention_s=2 * 3600, block_frames=2))
    _maintain(bank)
    memory, _ = bank.get_memory("cam")
    assert memory.oldest == (0 if rewritten else 3600 * MICROSECONDS)


def test_a_camera_that_was_let_go_is_left_to_the_process_that_has_it_since(clock: SimpleNamespace) -> None:
    tier = Arena(64 * MIB, name="host", evicts=False)
    first = _released(tier)
    second = _opened(tier, spec(retention_s=2 * 3600, block_frames=2))
    # Its camera sends nothing.
    _maintain(second)
    before = set(tier.list_blocks("cam")[1])
    clock.hours = 1.5
    _maintain(first)
    assert set(tier.list_blocks("cam")[1]) == before
    _maintain(second)
    memory, _ = second.get_memory("cam")
    assert memory.oldest == 3600 * MICROSECONDS
    assert memory.counts.lost == 0
    # What it lets go it forgets.
    second.release_stream("cam")
    assert second.wait_written()
    clock.hours = 4.0
    _maintain(first, second)
    assert tier.nbytes("cam") == 0


def test_a_camera_that_was_let_go_is_not_forgotten_under_a_question_and_once_its_tier_answers(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Arena(64 * MIB, name="host", evicts=False)
    bank = _released(tier)
    before = set(tier.list_blocks("cam")[1])
    memory, _ = bank.get_memory("cam")
    view = memory.open_view()
    clock.hours = 1.5
    _maintain(bank)
    assert set(tier.list_blocks("cam")[1]) == before
    memory.close_view(view)
    with monkeypatch.context() as patched:
        patched.setattr(tier, "manifest", lambda stream: (Outcome.RETRY, None))
        _maintain(bank)
    _maintain(bank)
    assert set(tier.list_blocks("cam")[1]) == before, "it is not asked all the time"
    clock.hours = 1.6
    _maintain(bank)
    assert bank.get_memory("cam")[0].oldest == 4200 * MICROSECONDS


def test_a_retention_whose_manifest_was_refused_is_tried_again(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Arena(64 * MIB, name="host", evicts=False)
    bank = _released(tier)
    clock.hours = 1.5
    with monkeypatch.context() as patched:
        patched.setattr(tier, "put_manifest", lambda stream, manifest: Outcome.RETRY)
        _maintain(bank)
    clock.hours = 1.55
    _maintain(bank)
    assert _oldest(TierStack([tier])) == 6


def test_what_the_earlier_process_writes_late_is_taken_over_too() -> None:
    tiers = stack()
    memory = StreamMemory("cam", spec(), tiers)
    chunks = [chunk(number) for number in range(20)]
    for each in chunks[:8]:
        memory.add_chunk(each)
    assert memory.save() is Outcome.HIT
    other = StreamMemory("cam", spec(), tiers)
    assert other.restore() is Outcome.HIT
    other.accept_chunk(chunks[12])
    for each in chunks[8:12]:
        memory.add_chunk(each)
    assert memory.save(b"window") is Outcome.HIT
    for each in chunks[13:]:
        other.add_chunk(each)
    assert other.save() is Outcome.HIT
    same(held(other), expected(chunks))
    # Also for who reads it next.
    third = StreamMemory("cam", spec(), tiers)
    assert third.restore() is Outcome.HIT
    same(held(third), expected(chunks))
    assert third.counts.lost == 0


def finer(each: KVChunk) -> KVChunk:
    """The same of a camera whose picture has twice as many rows and columns: each cell's lower left quarter."""
    row, column = each.cell // COLUMNS, each.cell % COLUMNS
    cell = (2 * row + 1) * 2 * COLUMNS + 2 * column
    return replace(each, cell=cell, rows=2 * ROWS, columns=2 * COLUMNS)


def test_a_window_that_is_stored_before_any_frame_does_not_change_the_grid() -> None:
    memory, other = (StreamMemory("cam", spec(), tiers) for tiers in [stack()] * 2)
    assert memory.restore() is other.restore() is Outcome.MISS
    chunks = [chunk(number) for number in range(8)]
    other.accept_chunk(chunks[0])
    # Handed over late, and before the window was full.
    assert memory.save(b"window") is Outcome.HIT
    for each in chunks[1:]:
        other.add_chunk(each)
    assert (other.rows, other.columns) == (ROWS, COLUMNS)
    same(held(other), expected(chunks))


def test_frames_that_wait_for_a_restore_are_put_on_the_restored_grid() -> None:
    memory, other = (StreamMemory("cam", spec(), tiers) for tiers in [stack()] * 2)
    assert other.restore() is Outcome.MISS
    chunks = [chunk(number) for number in range(8)]
    for each in chunks[4:6]:
        other.accept_chunk(finer(each))
    for each in chunks[:4]:
        memory.add_chunk(each)
    assert memory.save() is Outcome.HIT
    for each in chunks[6:]:
        other.add_chunk(finer(each))
    same(held(other), expected(chunks))


def test_a_memory_keeps_its_grid_when_all_its_frames_are_gone() -> None:
    memory = StreamMemory("cam", spec(compressor="infinipot_v"), stack())
    for number in range(4):
        memory.add_chunk(chunk(number))
    memory.delete_frames(before_frame=4)
    assert memory.frames == 0
    chunks = [chunk(number) for number in range(4, 8)]
    for each in chunks:
        memory.add_chunk(finer(each))
    assert memory.compressor.columns == memory.columns == COLUMNS
    same(held(memory), expected(chunks))


def test_frames_of_an_older_window_that_the_earlier_process_writes_late_are_there_once() -> None:
    """The other replica was given the window of an earlier save, before the last write was over."""
    memory = StreamMemory("cam", spec(), stack())
    chunks = [chunk(number) for number in range(16)]
    for each in chunks[:8]:
        memory.add_chunk(each)
    assert memory.save(b"window") is Outcome.HIT
    other = StreamMemory("cam", spec(), memory.tiers)
    assert other.restore() is Outcome.HIT
    assert other.stored.load_bytes("window")
    for each in (chunk(8, seed=1), chunk(9, seed=1)):
        other.accept_chunk(each)
    for each in chunks[8:12]:
        memory.add_chunk(each)
    assert memory.save(b"") is Outcome.HIT
    assert other.settle()
    assert other.frames == 12
    for each in (chunk(10, seed=1), chunk(11, seed=1), *chunks[12:]):
        other.add_chunk(each)
    same(held(other), expected(chunks))
    assert other.newest == chunks[-1].pts


def test_a_last_write_that_comes_too_late_replaces_nothing() -> None:
    tiers = stack()
    go = threading.Event()
    chunks = [chunk(number) for number in range(20)]

    def late(stream: str) -> None:
        assert go.wait(60.0)
        MemoryBank._write(banks[0], stream)

    banks = [MemoryBank(tiers), MemoryBank(tiers)]
    for bank, some in zip(banks, (chunks[:10], chunks[10:]), strict=True):
        bank.open_stream("cam", spec())
        for each in some[:8]:
            bank.accept_chunk(each)
        bank.save_stream("cam")
        for each in some[8:]:
            bank.accept_chunk(each)
        if bank is banks[0]:
            # The other replica is told not to wait.
            bank.writer = MemoryWriter(late)
            saved = bank.hand_over("cam", lambda: None)
    go.set()
    assert saved.result(60.0) is False
    assert banks[0].wait_written(60.0)
    third = StreamMemory("cam", spec(), tiers)
    assert third.restore() is Outcome.HIT
    same(held(third), expected([*chunks[:8], *(replace(each, index=each.index - 2) for each in chunks[10:18])]))
    for other in (third, banks[1].get_memory("cam")[0]):
        assert other.counts.lost == 0


def test_a_process_that_stood_still_within_a_write_replaces_nothing() -> None:
    """It compresses, so that what it would delete is most of the memory that the other one took over."""
    node, others = Arena(64 * MIB, name="node"), list[StreamMemory]()
    mine, theirs = (TierStack([Arena(64 * MIB, name="host"), node]) for _ in range(2))
    # Nothing was heard of the controller since the other one began.
    mine.confirmed = lambda: not others
    settings_ = spec(cap_bytes=100_000, compressor="uniform")

    def stand_still() -> None:
        if memory.counts.compressions and not others:
            others.append(StreamMemory("cam", settings_, theirs))
            assert others[0].restore() is Outcome.HIT
            for number in range(1000, 1008):
                others[0].add_chunk(chunk(number))
            assert others[0].save() is Outcome.HIT

    memory = StreamMemory("cam", settings_, mine, yield_to_engine=stand_still)
    numbers = itertools.count()
    while not others:
        memory.add_chunk(chunk(next(numbers)))
        if not others and not memory.recent:
            assert memory.save() is Outcome.HIT
    assert memory.save(b"window") is Outcome.RETRY
    there = others[0]
    assert all(isinstance(each, torch.Tensor) for each, _ in held(there).values())
    third = StreamMemory("cam", settings_, theirs)
    assert third.restore() is Outcome.HIT
    assert third.newest == 1007 * MICROSECONDS
    assert third.counts.lost == there.counts.lost == 0


@pytest.mark.parametrize("forgets", [False, True])
def test_a_server_that_comes_back_as_it_was_earlier_keeps_nothing_of_then(
    own_redis: RedisServer, forgets: bool
) -> None:
    """Restored from a snapshot, or a replica that lagged: its blocks would fill the camera's cap for good."""
    own_redis.start()
    with closing(RedisTier(own_redis.url, fingerprint=OURS, cap_bytes=MIB, ttl_s=600, deadline_s=10.0)) as tier:
        memory = StreamMemory("cam", spec(cap_bytes=96_000, compressor="uniform"), TierStack([stack().upper, tier]))
        memory.apply_cap()
        for number in range(60):
            memory.add_chunk(chunk(number))
        assert memory.save() is Outcome.HIT
        own_redis.client.save()
        for number in range(60, 120):
            memory.add_chunk(chunk(number))
        if forgets:
            memory.delete_frames(before_frame=110)
        assert memory.save() is Outcome.HIT
        own_redis.kill()
        own_redis.start()
        until(lambda: tier.nbytes() >= 0 and tier.state().up)
        for number in range(120, 136):
            memory.add_chunk(chunk(number))
            memory.save()
        assert memory.settle()
        assert memory.save() is Outcome.HIT
        assert memory.counts.frames_dropped == memory.counts.lost == 0
        loaded = [each.block for each in tier.load(tier.list_blocks("cam")[1]) if each.block is not None]
        there = [block for block in loaded if block.key.dtype is not torch.uint8]
        assert len(there) == sum(len(head.table) for _, _, head in memory.iter_heads())
        frames = {frame for block in there for frame in block.frame.tolist()}
        assert frames == {frame for _, _, frame, _ in held(memory)}
        assert (110 if forgets else 0) <= min(frames) < max(frames) == 135


@pytest.mark.parametrize("waits", [False, True])
def test_a_late_deletion_of_a_removed_camera_spares_the_next_one_of_its_name(waits: bool) -> None:
    """Also where it waits for a tier: replicas of one node share that, and the next camera is at another one."""
    node = Arena(64 * MIB, name="node")
    late, here = (MemoryBank(TierStack([Arena(MIB, name="host"), node])) for _ in range(2))
    late.open_stream("cam", spec(life="1"))
    for number in range(8):
        late.accept_chunk(chunk(number))
    late.save_stream("cam")
    first = node.list_blocks("cam")[1]
    late.release_stream("cam", save=False)
    if waits:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(node, "drop", lambda *_: None)
            assert late.delete_memory("cam", life="1").exception() is not None
    assert here.open_stream("cam", spec(life="2")) is None
    assert here.get_memory("cam")[0].stored.load_bytes("window") == b""
    assert here.get_memory("cam")[0].frames == 0, "it is another camera's"
    for number in range(8, 16):
        here.accept_chunk(chunk(number))
    here.save_stream("cam")
    second = node.list_blocks("cam")[1]
    assert not set(first) & set(second)
    if waits:
        late.tiers.finish_deletions()
    else:
        late.delete_memory("cam", life="1")
    assert not late.tiers.deleting
    assert node.list_blocks("cam")[1] == second
    third = StreamMemory("cam", spec(life="2"), here.tiers)
    assert third.restore() is Outcome.HIT
    same(held(third), expected([replace(chunk(number), index=number - 8) for number in range(8, 16)]))
    late.delete_memory("cam", life="2")
    assert node.list_blocks("cam")[1] == []
    assert node.manifest("cam")[1] is None


def test_a_window_that_was_not_saved_is_not_handed_over() -> None:
    """Serialised, it may be above an eighth of the cap where the window itself is not."""
    bank = MemoryBank(TierStack([Arena(64 * MIB, name="host"), Arena(64 * MIB, name="below")]))
    for size, saved in ((MIB, True), (4 * MIB + 1, False)):
        bank.open_stream("cam", spec())
        bank.window = lambda stream, has_room, size=size: lambda: bytes(size)
        assert bank.hand_over("cam", lambda: None).result(60.0) is saved


@pytest.mark.parametrize("organiser", organisers.names())
def test_another_process_takes_over(organiser: str) -> None:
    tiers = stack()
    memory = StreamMemory("cam", spec(organiser=organiser), tiers)
    chunks = [chunk(number) for number in range(24)]
    for each in chunks[:12]:
        memory.add_chunk(each)
    assert memory.save(b"window") is Outcome.HIT
    other = StreamMemory("cam", spec(organiser=organiser), tiers)
    assert other.restore() is Outcome.HIT
    assert other.stored.load_bytes("window") == b"window"
    same(held(other), expected(chunks[:12]))
    alone = StreamMemory("cam", spec(organiser=organiser), stack())
    for each in chunks:
        alone.add_chunk(each)
        if each.index >= 12:
            other.add_chunk(each)
    same(held(other), expected(chunks))
    assert torch.equal(other.heads[0][0].organiser.table.mean, alone.heads[0][0].organiser.table.mean)


def test_replaced_blocks_are_deleted_before_a_large_server_is_listed(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_redis.start("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
    own_redis.client.execute_command("DEBUG", "POPULATE", 100_000, "sightline:kv:kv:other:0:0", 10)
    # Far more steps than a third of the deadline has time for.
    monkeypatch.setattr(redis_link, "_SCANNED_AT_ONCE", 1)
    redis = RedisTier(own_redis.url, fingerprint="m", cap_bytes=32 * MIB, ttl_s=600, deadline_s=1.0)
    memory = StreamMemory("cam", spec(), TierStack([redis]))
    for number in range(16):
        memory.add_chunk(chunk(number))
        if not memory.recent:
            assert memory.save() is Outcome.HIT
    assert redis.list_blocks("cam")[0] is Outcome.RETRY
    there = {name for name in own_redis.names() if name.startswith("sightline:kv:kv:cam:")}
    # One block of index for each head.
    assert len(there) == sum(len(head.table) + 1 for _, _, head in memory.iter_heads())
    redis.close()


@pytest.mark.parametrize(
    ("late", "session", "before_at", "after_at"),
    [(False, 0, 1000, 1013), (True, 0, -13, 0), (False, 1007, 1000, 1007), (True, 1007, 1000, 1007)],
)
def test_a_session_that_counts_from_zero_or_not_is_recorded_after_a_restart(
    late: bool, session: int, before_at: int, after_at: int
) -> None:
    """Once frames came, their times stand: what is found of before only then goes before them."""
    tiers = stack()
    memory = StreamMemory("cam", spec(), tiers)
    before = [placed(memory, number, 1000 + number) for number in range(4)]
    for each in before:
        memory.add_chunk(each)
    assert memory.save(b"window") is Outcome.HIT
    other = StreamMemory("cam", spec(), tiers)
    assert late or other.restore() is Outcome.HIT
    after = [placed(other, number, session + number - 4, restarts=number == 4) for number in range(4, 8)]
    for each in after:
        other.add_chunk(each)
    same(held(other), expected(before + after))
    told = [*range(before_at, before_at + 4), *range(after_at, after_at + 4)]
    assert [time // MICROSECONDS for time in other.log.times] == told
    assert [each.pts for each in after] == list(other.log.times[4:])
    assert other.memory_time(session * MICROSECONDS) == after[0].pts


def test_frames_of_a_window_that_was_taken_over_are_not_recorded_twice() -> None:
    memory = StreamMemory("cam", spec(), stack())
    chunks = [chunk(number) for number in range(8)]
    for each in chunks[:4]:
        memory.add_chunk(each)
    memory.save(b"window")
    other = StreamMemory("cam", spec(), memory.tiers)
    other.restore()
    assert other.stored.load_bytes("window")
    for each in [chunk(2, seed=1), chunk(3, seed=1), *chunks[4:]]:
        other.add_chunk(each)
    same(held(other), expected(chunks))


def test_a_small_memory_that_was_taken_over_has_room_for_more() -> None:
    cap = 256 * 1024
    memory = StreamMemory("cam", spec(compressor="uniform", cap_bytes=cap), stack())
    for number in range(4):
        memory.add_chunk(chunk(number))
    assert memory.save(b"window") is Outcome.HIT
    other = StreamMemory("cam", memory.spec, memory.tiers)
    other.restore()
    # A window takes an eighth of the cap at most.
    assert other.stored.nbytes < memory.stored.nbytes + cap // 4
    for number in range(4, 8):
        other.add_chunk(chunk(number))
    assert not other.recent
    assert other.counts.compressions == 0


def test_blocks_that_wait_for_their_deletion_may_be_gone(redis_server: RedisServer) -> None:
    redis = RedisTier(redis_server.url, fingerprint="m", cap_bytes=32 * MIB, ttl_s=600, deadline_s=10.0)
    memory = StreamMemory("cam", spec(), TierStack([Arena(MIB, name="host"), redis]))
    for number in range(4):
        memory.add_chunk(chunk(number))
    assert memory.save() is Outcome.HIT
    view = memory.open_view()
    read = {(layer, h, block) for layer, h, head in memory.iter_heads() for block in head.table.block.tolist()}
    for number in range(4, 8):
        memory.add_chunk(chunk(number))
    assert memory.save() is Outcome.HIT
    kept = {(layer, h, block) for layer, h, head in memory.iter_heads() for block in head.table.block.tolist()}
    # A question reads the replaced ones still. They are deleted, but the answer to that is lost, and counts as failure.
    replaced = [BlockKey("cam", *each) for each in read - kept]
    assert redis.drop("cam", replaced) == len(replaced) > 0
    redis._link.failures += 1
    memory.close_view(view)
    assert memory.settle()
    assert not memory.unsaved
    assert memory.save() is Outcome.HIT
    assert memory.counts.lost == 0
    redis.close()


def test_nothing_is_taken_over_where_there_is_nothing() -> None:
    assert StreamMemory("cam", spec(), stack()).restore() is Outcome.MISS


def test_a_block_that_is_gone_costs_its_tokens_and_no_more() -> None:
    memory = StreamMemory("cam", spec(), stack())
    chunks = [chunk(number) for number in range(8)]
    for each in chunks:
        memory.add_chunk(each)
    counted = LOST["tokens"]
    key = key_of(memory, 0, 0, 0)
    gone = {(0, 0, int(f), int(c)) for f, c in zip(*_block(memory, key), strict=True)}
    uid = int(memory.heads[0][0].table.uid[0])
    memory.tiers.drop_blocks(0, "cam", [key])
    memory.add_chunk(chunk(8))
    for number in range(9, 12):
        memory.add_chunk(chunk(number))
    chunks += [chunk(number) for number in range(8, 12)]
    lost = len(gone)
    if memory.counts.lost == 0:
        # Nothing new joined that cluster: it turns out when it is read.
        memory.drop_lost_clusters(0, 0, [uid])
    assert memory.counts.lost == lost
    assert LOST["tokens"] - counted == lost
    same(held(memory), {at: kv for at, kv in expected(chunks).items() if at not in gone})


def test_lost_clusters_of_a_full_server_hold_nothing_up(own_redis: RedisServer) -> None:
    own_redis.start("--maxmemory-policy", "noeviction")
    redis = RedisTier(own_redis.url, fingerprint="m", cap_bytes=32 * MIB, ttl_s=600, deadline_s=10.0)
    cap = 64 * 1024
    memory = StreamMemory("cam", spec(compressor="uniform", organiser="frames", cap_bytes=cap), TierStack([redis]))
    for number in range(40):
        memory.add_chunk(chunk(number))
    assert memory.save() is Outcome.HIT
    redis.drop("cam", [key_of(memory, 0, 0, 2), key_of(memory, 1, 0, 2)])
    # Little room is left under the cap, and none on the server.
    memory.change_spec(replace(memory.spec, cap_bytes=memory.stored.nbytes))
    own_redis.client.config_set("maxmemory", 1)
    tokens = memory.tokens
    done = threading.Event()

    def run() -> None:
        with memory.exclusive:
            assert compress(memory, 0.5) is None
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(60)
    assert 0 < memory.counts.lost == tokens - memory.tokens
    redis.close()


def _block(memory: StreamMemory, key) -> tuple[list[int], list[int]]:  # type: ignore[no-untyped-def]
    (loaded,) = memory.tiers.load([key])
    assert loaded.block is not None
    return loaded.block.frame.tolist(), loaded.block.cell.tolist()


def test_a_clock_that_is_set_back_goes_on() -> None:
    memory = StreamMemory("cam", spec(), stack())
    for number in range(4):
        memory.add_chunk(placed(memory, number, number))
    # Frames leave the window later than they come, and some never: times follow those that came.
    placed(memory, 4, 4)
    memory.add_chunk(placed(memory, 5, 0, restarts=True))
    assert memory.newest == 14 * MICROSECONDS
    assert memory.memory_time(2 * MICROSECONDS) == 16 * MICROSECONDS
    assert memory.frames == 5


def test_a_clock_that_was_put_right_is_followed_again() -> None:
    memory = StreamMemory("cam", spec(), stack())
    # Set back by 998 s for two frames, then put right; what is a little ahead of all that was is right as it is.
    seconds = (1000, 1001, 3, 4, 1005, 1006, 1075)
    for number, second in enumerate(seconds):
        memory.add_chunk(placed(memory, number, second, restarts=second in (3, 1005, 1075)))
    assert [time // MICROSECONDS for time in memory.log.times] == [1000, 1001, 1011, 1012, 1022, 1023, 1075]
    assert memory.memory_time(1077 * MICROSECONDS) == 1077 * MICROSECONDS


@pytest.mark.parametrize("everything", [False, True])
def test_the_clock_of_a_memory_whose_frames_are_all_gone_goes_on(everything: bool) -> None:
    memory = StreamMemory("cam", spec(), stack())
    for number, second in enumerate((1000, 1001, 3, 4)):
        memory.add_chunk(placed(memory, number, second, restarts=second == 3))
    memory.delete_frames(before_frame=None if everything else 4)
    assert memory.frames == 0
    told = memory.memory_time(5 * MICROSECONDS)
    memory.add_chunk(placed(memory, 4, 5))
    assert told == memory.newest == 1013 * MICROSECONDS


def test_another_organiser_begins_with_nothing_on_the_same_clock() -> None:
    bank = MemoryBank(stack())
    bank.open_stream("cam", spec())
    memory, _ = bank.get_memory("cam")
    for number, second in enumerate((1000, 3)):
        bank.accept_chunk(placed(memory, number, second, restarts=True))
    bank.open_stream("cam", spec(organiser="frames"))
    assert bank.get_memory("cam")[0].frames == 0
    # Frames of the window that stayed come later.
    assert bank.memory_time("cam", 4 * MICROSECONDS) == 1011 * MICROSECONDS


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(["add", "add", "add", "settle", "forget", "restore"]), min_size=4, max_size=30),
    st.sampled_from(organisers.names()),
)
def test_any_course_of_events_keeps_just_what_it_should(events: list[str], organiser: str) -> None:
    memory = StreamMemory("cam", spec(organiser=organiser, kv_dtype="model"), stack())
    wanted: list[KVChunk] = []
    for event in events:
        if event == "add":
            each = chunk(memory.log.next_number)
            memory.add_chunk(each)
            wanted.append(each)
        elif event == "settle":
            memory.settle()
        elif event == "forget" and wanted:
            limit = wanted[len(wanted) // 2].index
            memory.delete_frames(before_frame=limit)
            wanted = [each for each in wanted if each.index >= limit]
        elif event == "restore":
            memory.settle()
            memory.save()
            memory = StreamMemory("cam", memory.spec, memory.tiers)
            memory.restore()
    waiting = {each.index for each in memory.recent}
    same(held(memory), expected([each for each in wanted if each.index not in waiting]), error=0.0)
    assert waiting <= {each.index for each in wanted}


class Below(Arena):
    """A tier whose loads may be out of reach for a while, as those of a node that does not answer."""

    reach = True

    def load(self, keys):  # type: ignore[no-untyped-def]
        return super().load(keys) if self.reach else [Loaded(Outcome.RETRY)] * len(keys)


@pytest.mark.parametrize("organiser", ["mosaic", "resv"])
def test_what_is_out_of_reach_for_a_while_is_not_lost(organiser: str) -> None:
    below = Below(64 * MIB, name="below")
    tiers = TierStack([Arena(4 * MIB, name="host"), below])
    memory = StreamMemory("cam", spec(organiser="frames"), tiers)
    grouped = StreamMemory("two", spec(organiser=organiser), tiers)
    chunks = [chunk(number) for number in range(24)]
    for each in chunks[:12]:
        memory.add_chunk(each)
        grouped.add_chunk(each)
    # The host forgets its copies, and what lies below does not answer.
    tiers.upper.drop("cam")
    tiers.upper.drop("two")
    below.reach = False
    for each in chunks[12:16]:
        grouped.add_chunk(each)
    assert grouped.counts.lost == 0
    # No token joins a cluster that would have to be loaded for that.
    assert not grouped.recent
    below.reach = True
    for each in chunks[16:20]:
        grouped.add_chunk(each)
    assert grouped.settle()
    assert not grouped.recent
    assert grouped.counts.lost == 0
    assert grouped.save() is Outcome.HIT
    below.reach = False
    other = StreamMemory("two", grouped.spec, tiers)
    assert other.restore() is Outcome.RETRY
    for each in chunks[20:]:
        other.add_chunk(each)
    assert [each.index for each in other.recent] == [0, 1, 2, 3]
    below.reach = True
    assert other.settle()
    assert other.counts.lost == 0
    same(held(other), expected(chunks))


def test_blocks_written_after_the_manifest_do_not_count_and_are_deleted() -> None:
    tiers = stack()
    memory = StreamMemory("cam", spec(organiser="resv"), tiers)
    chunks = [chunk(number) for number in range(12)]
    for each in chunks[:8]:
        memory.add_chunk(each)
    memory.save()
    for each in chunks[8:]:
        memory.add_chunk(each)
    left = set(tiers.lowest.list_blocks("cam")[1])
    other = StreamMemory("cam", memory.spec, tiers)
    assert other.restore() is Outcome.HIT
    same(held(other), expected(chunks[:8]))
    # Its earlier process may be writing still.
    assert set(tiers.lowest.list_blocks("cam")[1]) == left
    assert other.settle()
    assert set(tiers.lowest.list_blocks("cam")[1]) < left
    _, manifest = tiers.lowest.manifest("cam")
    assert 0 <= tiers.usage("cam")["host"] - other.stored.nbytes - cell_size(len(manifest)) < 256
    later = [chunk(number, seed=5) for number in range(8, 12)]
    for each in later:
        other.add_chunk(each)
    assert other.counts.lost == 0
    assert other.tokens == len(expected(chunks[:8])) + len(expected(later))


# The call from which on it fails; one choice is made for held and new tokens together.
@pytest.mark.parametrize(
    ("where", "failing"),
    [
        *itertools.product([(HeadMemory, "add_tokens"), (HeadMemory, "copy"), (Arena, "store")], [1, 2]),
        ((InfiniPotV, "select"), 1),
    ],
)
def test_an_exception_costs_the_frames_at_hand_at_most(
    where: tuple[type, str], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap = 96 * 1024
    memory = StreamMemory("cam", spec(compressor="infinipot_v", organiser="frames", cap_bytes=cap), stack())
    memory.tiers.set_cap("cam", cap)
    chunks = [chunk(number) for number in range(80)]
    for each in chunks[:60]:
        memory.add_chunk(each)
    assert memory.counts.compressions > 0
    assert memory.save() is Outcome.HIT
    before, away = held(memory), memory.counts.compressed_away
    owner, name = where
    work, calls = getattr(owner, name), itertools.count(1)

    def fail(*given_: object, **options: object) -> object:
        if next(calls) >= failing:
            raise MemoryError("no room")
        return work(*given_, **options)

    for each in chunks[60:64]:
        memory.accept_chunk(each)
    # Once: the frames go on waiting. Twice: they are given up, and counted.
    for waiting in (4, 0):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(MemoryError):
                memory.settle()
        # A compression that was due may have come first.
        found = held(memory)
        same(found, {at: before[at] for at in found})
        assert len(before) - len(found) <= memory.counts.compressed_away - away
        assert len(memory.recent) == waiting
        calls = itertools.count(1)
    assert memory.counts.frames_dropped == 4
    assert memory.counts.lost == 0
    # Nothing else is lost, neither here nor for who takes over, and the next frames are taken in.
    other = StreamMemory("cam", memory.spec, memory.tiers)
    assert other.restore(sweep=False) is Outcome.HIT
    restored = held(other)
    same(restored, {at: before[at] for at in restored})
    assert set(restored) >= set(found)
    for each in chunks[64:72]:
        memory.add_chunk(each)
    wanted = expected(chunks)
    found = held(memory)
    same(found, {at: wanted[at] for at in found})
    assert {frame for _, _, frame, _ in found} >= {71}
    assert memory.save() is Outcome.HIT
    assert memory.stored.nbytes <= cap


def test_a_block_that_fails_twice_costs_no_other_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = StreamMemory("cam", spec(), stack())
    chunks = [chunk(number) for number in range(16)]
    for each in chunks:
        memory.accept_chunk(each)
    work = StreamMemory._cluster_frames

    def fail(self: StreamMemory, frames: list[KVChunk]) -> bool:
        if frames[0].index == 4:
            raise MemoryError("no room")
        return work(self, frames)

    monkeypatch.setattr(StreamMemory, "_cluster_frames", fail)
    for _ in range(2):
        with pytest.raises(MemoryError):
            memory.settle()
    assert memory.settle()
    assert memory.counts.frames_dropped == 4
    same(held(memory), {at: kv for at, kv in expected(chunks).items() if not 4 <= at[2] < 8})


def test_frames_that_come_while_others_are_clustered_are_stored_or_counted() -> None:
    """More come than the cap has room for while a block is written."""
    numbers, clustering = iter(range(40, 70)), False

    def feed() -> None:
        if clustering and (number := next(numbers, None)) is not None:
            memory.accept_chunk(chunk(number))

    memory = StreamMemory("cam", spec(compressor="uniform", cap_bytes=130_000), stack(), None, feed)
    for number in range(40):
        memory.accept_chunk(chunk(number))
    clustering = True
    assert memory.settle()
    there = {frame for _, _, frame, _ in held(memory)} | {each.index for each in memory.recent}
    assert memory.counts.frames_dropped > 0
    assert memory.counts.compressed_away == 0
    assert len(there) == memory.counts.frames - memory.counts.frames_dropped


def test_frames_that_waited_for_a_tier_are_clustered_a_block_at_a_time() -> None:
    """Room that clustering takes grows with the square of the tokens that come at once."""

    class Counting(ReSV):
        most = 0

        def add(self, tokens: NewTokens, at_hand: AtHand) -> torch.Tensor:
            Counting.most = max(Counting.most, len(tokens))
            return super().add(tokens, at_hand)

    chunks = [chunk(number) for number in range(50)]
    memory = StreamMemory("cam", spec(), stack())
    for each in chunks:
        memory.accept_chunk(each)
    memory.heads = memory._new_heads()
    for _, _, head in memory.iter_heads():
        head.organiser = Counting(WIDTH)
    assert memory.settle()
    assert memory.counts.settled == 13
    assert 0 < Counting.most <= 4 * ROWS * COLUMNS
    same(held(memory), expected(chunks))


@pytest.mark.parametrize("organiser", ["resv", "mosaic", "frames"])
def test_what_lies_on_the_device_stays_within_what_admission_counts(organiser: str) -> None:
    """One layer of a memory of 7B's shape at the default cap: four heads of 128, frames of 35 tokens."""
    cap = 64 * MIB // 28
    memory = StreamMemory(
        "cam", MemorySpec(cap_bytes=cap, organiser=organiser), TierStack([Arena(2 * cap, slab_bytes=2**16)])
    )
    index, waiting = 0, 0
    for each in made_chunks("cam", 90, layers=1, heads=4, rows=5, columns=7, width=128):
        memory.add_chunk(replace(each, key=each.key.bfloat16(), value=each.value.bfloat16()))
        tables = [head.table for _, _, head in memory.iter_heads()]
        tensors = [each for table in tables for each in (*vars(table).values(), *table.columns.values())]
        index = max(index, sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor)))
        waiting = max(waiting, memory.waiting_bytes)
    assert memory.counts.compressions > 0
    assert 0 < index <= cap / INDEX
    assert cap / 16 < waiting <= cap / WAITING


def test_frames_that_wait_for_a_tier_take_their_share_of_the_device_and_the_host_the_rest() -> None:
    """Admission counts an eighth of a cap: with a tier down, cameras would fill the device with whole ones."""
    cap = 64 * MIB // 28
    with FakeCuda():
        memory = StreamMemory("cam", MemorySpec(cap_bytes=cap, organiser="frames"), stack())
        for each in made_chunks("cam", 30, layers=1, heads=4, rows=5, columns=7, width=128):
            parts = (each.key.bfloat16(), each.value.bfloat16(), each.cell, each.mean_embedding)
            key, value, cell, look = (part.to(DEVICE) for part in parts)
            memory.accept_chunk(replace(each, key=key, value=value, cell=cell, mean_embedding=look))
            there = [one for one in memory.recent if one.key.device == DEVICE]
            assert sum(one.key.nbytes + one.value.nbytes for one in there) <= cap // 8
        # All of them wait, and some on either side.
        assert len(memory.recent) == 30 > len(there) > 0
        assert memory.settle()
    assert not memory.recent
    assert memory.counts.frames_dropped == 0


def test_frames_that_only_some_heads_hold_have_their_times_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier refuses in the middle of a block of frames, and the process ends after its next manifest."""
    monkeypatch.setattr("cluster.memory.tiered_heads._BATCH", 1)
    memory = StreamMemory("cam", spec(), stack())
    for number in range(8):
        memory.accept_chunk(chunk(number))
    assert memory.settle(upto=3)
    store, calls = Arena.store, itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(
            Arena, "store", lambda *given_: store(*given_) if next(calls) < 3 else [Outcome.RETRY] * len(given_[1])
        )
        assert not memory.settle()
    assert len({int(head.frame.max()) for _, _, head in memory.iter_heads()}) == 2
    assert memory.save() is Outcome.HIT
    other = StreamMemory("cam", spec(), memory.tiers)
    assert other.restore(sweep=False) is Outcome.HIT
    for _, _, head in other.iter_heads():
        assert other.log.frame_times(head.frame).tolist() == [each * MICROSECONDS for each in head.frame.tolist()]
    assert list(other.log.numbers) == list(range(8))


@pytest.mark.parametrize("compressor", ["cords", "novelty"])
def test_a_compressor_goes_on_after_a_restart_as_without_one(compressor: str) -> None:
    """Weights of earlier compressions and a cell's background decide the next one, and come back with the index."""

    def run(restart: bool, forget: bool = False) -> dict[tuple[int, int], list[tuple[int, int]]]:
        lower = Arena(64 * MIB, name="node")
        memory = StreamMemory("cam", spec(compressor=compressor), TierStack([Arena(64 * MIB, name="host"), lower]))
        for number in range(40):
            memory.add_chunk(chunk(number))
            if number % 8 == 7:
                assert compress(memory, 0.6)
        assert memory.save() is Outcome.HIT
        if restart:
            memory = StreamMemory("cam", memory.spec, TierStack([Arena(64 * MIB, name="host"), lower]))
            assert memory.restore() is Outcome.HIT
        memory.change_spec(memory.spec)
        if forget:
            memory.change_spec(replace(memory.spec, compressor="sliding"))
            memory.change_spec(replace(memory.spec, compressor=compressor))
            for _, _, head in memory.iter_heads():
                head.weight = torch.zeros(0)
        for number in range(40, 48):
            memory.add_chunk(chunk(number))
        weights = torch.cat([head.weight for head in memory.heads[0]])
        assert forget or (float(weights.max()) > 2 and float(weights.min()) == 1)
        assert compress(memory, 0.4)
        return {
            (layer, h): list(zip(head.frame.tolist(), head.cell.tolist(), strict=True))
            for layer, h, head in memory.iter_heads()
        }

    wanted = run(restart=False)
    assert run(restart=True) == wanted
    assert run(restart=True, forget=True) != wanted


@pytest.mark.parametrize("restart", [False, True])
def test_another_compressor_takes_no_weights_of_the_one_before(restart: bool) -> None:
    """A mass of CoRDS would be a score of novelty that nothing can have."""

    def weights(memory: StreamMemory) -> torch.Tensor:
        return torch.cat([head.weight for _, _, head in memory.iter_heads()])

    memory = StreamMemory("cam", spec(compressor="cords"), stack())
    for number in range(40):
        memory.add_chunk(chunk(number))
    assert compress(memory, 0.3)
    assert memory.save() is Outcome.HIT
    assert float(weights(memory).max()) > 5
    if restart:
        memory = StreamMemory("cam", spec(compressor="novelty"), memory.tiers)
        assert memory.restore() is Outcome.HIT
    else:
        memory.change_spec(spec(compressor="novelty"))
    assert memory.settle()
    assert compress(memory, 0.9)
    # A score is a cosine distance, at most 2, above what is not scored.
    scored = weights(memory)
    assert 2 <= float(scored.max()) <= 4
    assert memory.settle()
    assert torch.equal(weights(memory), scored)


def test_a_camera_that_changes_its_size_has_its_cells_at_their_place_of_the_picture() -> None:
    """From 3 x 4 cells to 6 x 2, of which two lie in each row and every column is two wide; two of text behind them."""
    memory = StreamMemory("cam", spec(), stack())
    memory.add_chunk(chunk(0))
    other = replace(chunk(1, tokens=5), cell=torch.tensor([0, 3, 11, 12, 13]), rows=6, columns=2)
    memory.add_chunk(other)
    assert (memory.rows, memory.columns) == (ROWS, COLUMNS)
    assert memory.recent[1].cell.tolist() == [0 * 4 + 1, 0 * 4 + 3, 2 * 4 + 3, 12, 13]


def test_weights_that_do_not_fit_their_tokens_are_refused() -> None:
    memory = StreamMemory("cam", spec(), stack())
    for number in range(4):
        memory.add_chunk(chunk(number))
    head = memory.heads[0][0]
    state = head.state() | {"weight": torch.ones(head.tokens + 1)}
    with pytest.raises(ValueError, match=f"{head.tokens + 1} weights of {head.tokens} tokens"):
        memory.heads[0][1].load_state(state)


@pytest.mark.parametrize(
    ("compressor", "organiser", "evicts", "restart"),
    [("uniform", "resv", False, False), ("novelty", "kvmu", False, True), ("none", "frames", True, True)],
)
def test_a_memory_shrinks_to_a_lowered_cap_and_goes_on(
    compressor: str, organiser: str, evicts: bool, restart: bool
) -> None:
    tier = Arena(64 * MIB, name="host", evicts=evicts)
    before = spec(compressor=compressor, organiser=organiser, cap_bytes=2 * MIB)
    bank = _opened(tier, before)
    chunks = [chunk(number, tokens=ROWS * COLUMNS) for number in range(68)]
    _feed(bank, chunks[:36])
    memory, _ = bank.get_memory("cam")
    assert memory.save(b"window" * 5000) is Outcome.HIT
    assert memory.counts.compressions == 0
    low = tier.nbytes("cam") // 3
    after = replace(before, cap_bytes=low)
    view = memory.open_view()
    if restart:
        bank.release_stream("cam")
        assert bank.wait_written()
        bank = _opened(tier, after)
    else:
        bank.open_stream("cam", after)
    # Before a frame comes: what is forgotten is gone, and no more than that.
    deletion = bank.delete_memory("cam", 33.5)
    if restart:
        assert deletion.result(60.0).frames == 2
    # It waits for the view.
    memory.close_view(view)
    assert deletion.result(60.0).frames == 2
    memory, _ = bank.get_memory("cam")
    assert memory.oldest == 2 * MICROSECONDS
    assert min(at[2] for at in held(memory)) == 2
    for number in range(36, 60, 4):
        _feed(bank, chunks[number : number + 4])
    bank.save_stream("cam")
    assert low / 4 < tier.nbytes("cam") <= low
    assert memory.held_bytes <= low
    assert memory.counts.lost == memory.counts.frames_dropped == 0
    wanted, found = expected(chunks), held(memory)
    same(found, {at: wanted[at] for at in found})
    assert max(at[2] for at in found) == 59
    # A cap that is raised again is used again.
    bank.open_stream("cam", before)
    _feed(bank, chunks[60:])
    assert {at: wanted[at] for at in wanted if at[2] >= 60}.keys() <= held(memory).keys()


@pytest.mark.parametrize("lowest", ["redis", "node"])
def test_a_memory_shrinks_to_what_its_tier_allows_now_and_goes_on(redis_server: RedisServer, lowest: str) -> None:
    """A restart with ``tiers.camera_bytes`` below what the camera holds there, and ``memory.cap`` with it."""
    chunks = [chunk(number, tokens=ROWS * COLUMNS) for number in range(72)]
    with ExitStack() as stack_:
        node = stack_.enter_context(serving(Arena(64 * MIB, name="node")))

        def opened(cap: int) -> tuple[Tier, MemoryBank]:
            if lowest == "redis":
                redis = RedisTier(redis_server.url, fingerprint=OURS, cap_bytes=cap, ttl_s=600, deadline_s=10.0)
                tier: Tier = stack_.enter_context(closing(redis))
            else:
                tier = stack_.enter_context(remote(node.address, cap_bytes=cap, deadline_s=10.0))
            return tier, _opened(tier, spec(compressor="uniform", cap_bytes=cap))

        tier, bank = opened(2 * MIB)
        _feed(bank, chunks[:48])
        bank.release_stream("cam")
        assert bank.wait_written()
        low = tier.nbytes("cam") // 3
        tier, bank = opened(low)
        for number in range(48, 72, 4):
            _feed(bank, chunks[number : number + 4])
        bank.save_stream("cam")
        memory, _ = bank.get_memory("cam")
        assert low / 4 < tier.nbytes("cam") <= low
        assert memory.held_bytes <= low
        assert memory.counts.lost == memory.counts.frames_dropped == 0
        found = held(memory)
        wanted = expected(chunks)
        same(found, {at: wanted[at] for at in found})
        assert min(at[2] for at in found) < 48
        assert max(at[2] for at in found) == 71
        # From then on it never has more than that, whoever asks for it.
        bank.tiers.set_cap("cam", 2 * MIB)
        assert tier.cap("cam") == low


def _opened(tier: Tier, settings_: MemorySpec) -> MemoryBank:
    bank = MemoryBank(TierStack([tier]))
    bank.open_stream("cam", settings_)
    return bank


def _feed(bank: MemoryBank, chunks: list[KVChunk]) -> None:
    for each in chunks:
        bank.accept_chunk(each)
    bank.schedule_saves()
    assert bank.wait_written()


def test_a_restart_with_other_options_of_the_organiser_begins_anew_as_a_change_does() -> None:
    """Hashes by other planes say nothing of each other."""
    tier = Arena(64 * MIB, name="host", evicts=False)
    bank = _opened(tier, spec())
    _feed(bank, [chunk(number) for number in range(4)])
    bank.release_stream("cam")
    assert bank.wait_written()
    before = set(tier.list_blocks("cam")[1])
    assert before
    other = _opened(tier, spec(organiser_options={"seed": 1}))
    memory, _ = other.get_memory("cam")
    assert memory.tokens == 0
    _feed(other, [chunk(number) for number in range(4, 8)])
    assert memory.tokens > 0
    assert not before & set(tier.list_blocks("cam")[1])
    # With the same, it goes on.
    other.release_stream("cam")
    assert other.wait_written()
    again, _ = _opened(tier, spec(organiser_options={"seed": 1})).get_memory("cam")
    assert again.tokens == memory.tokens


def _hidden(tiers: TierStack) -> tuple[MemoryBank, Future[DeletedMemory], threading.Event]:
    """A bank that hides what is older than 4 s of 12 and its window, and deletes it once the event is set."""
    bank, go = MemoryBank(tiers), threading.Event()
    bank.window = lambda stream, has_room: lambda: b"window"
    bank.open_stream("cam", spec())
    _feed(bank, [chunk(number) for number in range(12)])
    bank.save_stream("cam")

    def late(stream: str) -> None:
        assert go.wait(60.0)
        MemoryBank._write(bank, stream)

    bank.writer = MemoryWriter(late)
    return bank, bank.delete_memory("cam", 4.0), go


def _oldest(tiers: TierStack) -> int:
    """Of the frames that the lowest tier has."""
    blocks = [one.block for one in tiers.lowest.load(tiers.lowest.list_blocks("cam")[1])]
    return min(int(each.frame.min()) for each in blocks if each is not None and each.key.dtype != torch.uint8)


@pytest.mark.parametrize("how", ["surrendered", "handed over too late"])
def test_a_deletion_that_another_process_forestalls_fails_and_is_repeated_there(how: str) -> None:
    tiers = stack()
    first, deletion, go = _hidden(tiers)
    second = MemoryBank(tiers)
    second.open_stream("cam", spec())
    if how == "surrendered":
        first.release_stream("cam", save=False)
    else:
        first.hand_over("cam", lambda: None)
        second.save_stream("cam")
    go.set()
    with pytest.raises(UnavailableError, match="forget it again"):
        deletion.result(60.0)
    assert second.get_memory("cam")[0].oldest == 0
    assert second.delete_memory("cam", 4.0).result(60.0).frames == 7
    assert _oldest(tiers) == 7


def test_a_deletion_is_done_by_who_hands_the_camera_over() -> None:
    tiers = stack()
    bank, deletion, go = _hidden(tiers)
    saved = bank.hand_over("cam", lambda: None)
    go.set()
    assert deletion.result(60.0).frames == 7
    assert not saved.result(60.0), "one tier: no other process finds it"
    assert _oldest(tiers) == 7


@pytest.mark.parametrize("refused", ["state", "store", "put_manifest"])
def test_a_deletion_fails_while_a_tier_is_down_and_is_made_up_for(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = stack()
    bank, deletion, go = _hidden(tiers)
    with monkeypatch.context() as patched:
        down = {
            "state": lambda: TierState(False, "down"),
            "store": lambda items: [Outcome.RETRY] * len(items),
            "put_manifest": lambda stream, manifest: Outcome.RETRY,
        }
        patched.setattr(tiers.lowest, refused, down[refused])
        go.set()
        with pytest.raises(UnavailableError, match="not deleted in every tier"):
            deletion.result(60.0)
        assert bank.wait_written()
        assert bank.get_memory("cam")[0].oldest == 7 * MICROSECONDS
    _maintain(bank)
    assert _oldest(tiers) == 7
    # What was saved of the window has what was to be deleted, and nobody made another one since.
    assert MemoryBank(tiers).open_stream("cam", spec()) in (None, b"")


def test_an_upper_tier_that_is_down_is_not_said_to_have_forgotten_and_costs_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deletion was done while the node still had what it deleted, and every block of the meantime was remembered."""
    node = Arena(64 * MIB, name="node")
    bank = MemoryBank(TierStack([node, Arena(64 * MIB, name="redis", evicts=False)]))
    bank.open_stream("cam", spec())
    _feed(bank, [chunk(number) for number in range(12)])
    memory, _ = bank.get_memory("cam")
    with monkeypatch.context() as patched:
        patched.setattr(node, "store", lambda items: [Outcome.RETRY] * len(items))
        patched.setattr(node, "load", lambda keys: [Loaded(Outcome.RETRY)] * len(keys))
        patched.setattr(node, "list_blocks", lambda stream: (Outcome.RETRY, []))
        patched.setattr(node, "drop", lambda stream, keys=None: None)
        _feed(bank, [chunk(number) for number in range(12, 60)])
        assert sum(map(len, memory.stored._unnamed)) == 0
        with pytest.raises(UnavailableError, match="not deleted in every tier"):
            bank.delete_memory("cam", 52.0).result(60.0)
    assert _oldest(TierStack([node])) == 0
    monkeypatch.setattr("cluster.memory.writer.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60))
    assert bank.delete_memory("cam", 52.0).result(60.0).frames == 0
    assert _oldest(TierStack([node])) == 7


def test_a_closed_camera_is_asked_about_as_the_last_process_that_had_it_left_it() -> None:
    """A replica that was asked about it before answered, and forgot, by what it had been then."""
    node = Arena(64 * MIB, name="node", evicts=False)
    first, second = (MemoryBank(TierStack([Arena(MIB, name="host"), node]), default=spec()) for _ in range(2))
    for bank, numbers in ((first, range(8)), (second, range(8, 40))):
        bank.open_stream("cam", spec())
        _feed(bank, [chunk(number) for number in numbers])
        bank.release_stream("cam")
        assert bank.wait_written()
        assert bank.get_memory("cam")[0].frames == numbers.stop
    held = first.get_memory("cam")[0]
    assert held.frames == 40
    assert first.get_memory("cam")[0] is held
    assert second.delete_memory("cam", 5.0).result(60.0).frames == 34
    assert first.delete_memory("cam", 3.0).result(60.0).frames == 2
    assert second.get_memory("cam")[0].oldest == 36 * MICROSECONDS


def test_a_camera_that_is_handed_over_leaves_nothing_of_its_index_behind(redis_server: RedisServer) -> None:
    """A replica that cameras came and left for weeks held the index of each, and counted their bytes as its own."""
    with closing(RedisTier(redis_server.url, fingerprint=OURS, cap_bytes=32 * MIB, ttl_s=99)) as tier:
        bank = MemoryBank(TierStack([Arena(MIB, name="host"), tier]))
        bank.open_stream("cam", spec())
        _feed(bank, [chunk(number) for number in range(12)])
        bank.hand_over("cam", lambda: None).result(60.0)
        assert (tier.nbytes(), tier._indexes) == (0, {})
        bank.open_stream("cam", spec())
        assert bank.get_memory("cam")[0].frames == 12
        assert tier.nbytes("cam") > 0


def test_a_camera_that_ended_leaves_nothing_of_its_index_behind_either(
    clock: SimpleNamespace, redis_server: RedisServer
) -> None:
    """What is too old of it is deleted by who had it last, and questions read it: each took up its index again."""
    with closing(RedisTier(redis_server.url, fingerprint=OURS, cap_bytes=32 * MIB, ttl_s=99)) as tier:
        bank = _released(tier)
        clock.hours = 1.5
        _maintain(bank)
        assert bank.memory_reports()["cam"].frames == 4
        assert (tier.nbytes(), tier._indexes) == (0, {})
        assert bank.get_memory("cam")[0].frames == 4
        assert tier.nbytes("cam") > 0
        clock.hours = 3.6
        _maintain(bank)
        assert (tier.nbytes(), tier._indexes) == (0, {})


def test_what_is_forgotten_is_forgotten_again_in_part() -> None:
    """The second was refused as unreadable until the next frames had been written."""
    bank = _opened(Arena(64 * MIB, name="host", evicts=False), spec())
    _feed(bank, [chunk(number) for number in range(4)])
    assert bank.delete_memory("cam").result(60.0).frames == 4
    for ago_s in (3600.0, None, 0.0):
        assert bank.delete_memory("cam", ago_s).result(60.0).frames == 0
    _feed(bank, [chunk(number) for number in range(4, 8)])
    assert bank.get_memory("cam")[0].frames == 4


def test_a_compression_holds_each_head_once_beside_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all heads, what is stored stayed beside what it was joined to: a memory once more, as float32."""

    def alive() -> int:
        return sum(type(one) is LayerKV for one in gc.get_objects())

    memory = StreamMemory("cam", spec(compressor="sliding"), stack())
    for number in range(8):
        memory.add_chunk(chunk(number))
    new = memory._unsettled([chunk(8)])
    before, select, most = alive(), memory.compressor.select, 0

    def selecting(layers: list[LayerKV], budget: int) -> list[list[torch.Tensor]]:
        nonlocal most
        most = alive()
        return select(layers, budget)

    monkeypatch.setattr(memory.compressor, "select", selecting)
    assert compress(memory, 0.5, new) is not None
    # All heads, each layer of them side by side, and those that were read last.
    assert 0 < most - before <= LAYERS * HEADS + LAYERS + HEADS


def test_what_a_full_server_refuses_takes_no_room(own_redis: RedisServer) -> None:
    """Every attempt was counted until the cap was reached, and then waiting frames were dropped."""
    own_redis.start()
    with closing(RedisTier(own_redis.url, fingerprint=OURS, cap_bytes=MIB, ttl_s=99)) as tier:
        bank = MemoryBank(TierStack([Arena(MIB, name="host"), tier]))
        bank.open_stream("cam", spec(cap_bytes=MIB))
        _feed(bank, [chunk(number) for number in range(12)])
        memory, _ = bank.get_memory("cam")
        before = memory.stored.nbytes
        own_redis.client.config_set("maxmemory", 1)
        _feed(bank, [chunk(number) for number in range(12, 24)])
        for _ in range(10):
            _maintain(bank)
        assert len(memory.recent) == 12
        assert memory.stored.nbytes == before
        own_redis.client.config_set("maxmemory", 0)
        _maintain(bank)
        assert not memory.recent


def test_a_deletion_before_the_memory_was_read_spares_what_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = stack()
    first, _, go = _hidden(tiers)
    go.set()
    first.release_stream("cam")
    assert first.wait_written()
    second = MemoryBank(tiers)
    with monkeypatch.context() as patched:
        patched.setattr(tiers.lowest, "manifest", lambda stream: (Outcome.RETRY, None))
        second.open_stream("cam", spec())
        with pytest.raises(UnavailableError, match="cannot be read now"):
            second.delete_memory("cam", 2.0)
        # By the time of a frame in the window, the second after the last one remembered.
        deletion = second.delete_memory("cam", 3.0, newest=12 * MICROSECONDS)
        with pytest.raises(UnavailableError, match="not deleted in every tier"):
            deletion.result(60.0)
        assert second.wait_written()
    _maintain(second)
    memory, _ = second.get_memory("cam")
    assert (memory.oldest, memory.newest) == (9 * MICROSECONDS, 11 * MICROSECONDS)
    assert _oldest(tiers) == 9


@pytest.mark.parametrize("refused", ["memory", "Thread-"])
def test_memories_are_written_although_no_thread_could_be_started(refused: str, monkeypatch) -> None:
    """Neither by a process at its limit, nor within one that it just could start."""
    bank, start = MemoryBank(stack()), threading.Thread.start
    bank.open_stream("cam", spec())

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        for number in range(4):
            bank.accept_chunk(chunk(number))
        bank.schedule_saves()
        time.sleep(0.2)
    bank.run_maintenance()
    assert bank.wait_written(10.0)
    assert bank.get_memory("cam")[0].counts.settled


def test_a_deletion_that_waits_for_a_reader_holds_up_no_other_camera() -> None:
    bank = MemoryBank(stack())
    views, deletions = [], []
    for name in map(str, range(THREADS)):
        bank.open_stream(name, spec())
        for number in range(12):
            bank.accept_chunk(replace(chunk(number), stream=name))
        bank.save_stream(name)
        memory, _ = bank.get_memory(name)
        views.append((memory, memory.open_view()))
        deletions.append(bank.delete_memory(name, 4.0))
    bank.open_stream("other", spec())
    for number in range(4):
        bank.accept_chunk(replace(chunk(number), stream="other"))
    bank.schedule_saves()
    assert bank.wait_written(10.0)
    assert bank.get_memory("other")[0].counts.settled
    assert not any(deletion.done() for deletion in deletions)
    for memory, view in views:
        memory.close_view(view)
    assert all(deletion.result(60.0).frames for deletion in deletions)
