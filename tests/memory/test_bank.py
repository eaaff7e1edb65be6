"""Memories while their tiers fail: windows go on as without a memory, questions are answered from what is in reach, and
what comes back comes back without a restart."""

import contextlib
import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_parts import key_of
from redis_server import RedisServer
from remembering import MIB, SHORT_S, Site, answered, redis_tier, stream
from waiting import until

from cluster.engine.native import NativeEngine
from cluster.errors import NotReadyError, UnavailableError
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk
from cluster.memory.manifest import dump_manifest, load_manifest
from cluster.memory.memory_counts import LOST
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.memory.writer import MAX_SNAPSHOTS, THREADS, MemoryWriter
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.types import AskSpec, DeletedMemory, MemorySpec

SMALL = MIB // 4
"""Host memory for a part of what the camera of these tests remembers."""


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    torch.set_num_threads(1)
    return load_model("tiny-qwen2_5_vl")


@pytest.fixture
def site(model: VisionLanguageModel, redis_server: RedisServer) -> Iterator[Callable[..., Site]]:
    """Makes sites over the server that leave it running."""
    made: list[Site] = []

    def make(server: RedisServer | None = None, **options: float) -> Site:
        made.append(Site(model, (server or redis_server).url, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.tiers.close()


Make = Callable[..., Site]


# -- Redis fails ----------------------------------------------------------------------------------
def test_redis_that_is_down_at_the_start_is_used_once_it_is_there(site: Make, own_redis: RedisServer) -> None:
    here = site(own_redis)
    assert here.watch(24) > 4
    assert "redis: the server cannot be reached" in here.trouble()
    assert not here.bank.get_memory("cam")[0].restored
    answer = here.ask()
    assert not answer.degraded, "all of it waits here"
    assert answer.moments
    assert here.held == 0
    own_redis.start()
    here.recovered()
    assert {name for name in own_redis.names() if ":kv:cam:" in name}
    here.tiers.upper.drop("cam")
    answer = here.ask()
    assert not answer.degraded
    assert answer.tokens_read == here.held > 0
    assert here.lost == 0


def test_redis_that_is_killed_and_comes_back_empty_costs_what_only_it_held(site: Make, own_redis: RedisServer) -> None:
    own_redis.start()
    here = site(own_redis, host_bytes=SMALL)
    here.watch(40)
    assert not here.ask().degraded
    own_redis.kill()
    here.watch(8)
    assert here.trouble().startswith("redis: the server cannot be reached")
    answer = here.ask()
    assert answer.degraded
    assert 0 < answer.tokens_read < answer.tokens_held
    own_redis.start()

    def rewritten() -> bool:
        """What the host has copies of is written again; before that is noticed, all may seem well."""
        here.tend()
        return bool(own_redis.client.exists("sightline:kv:manifest:cam"))

    until(rewritten)
    here.recovered()
    assert here.ask().degraded, "the rest is gone"
    here.tend()
    assert here.lost > 0
    before = here.lost
    answer = here.ask()
    assert not answer.degraded
    assert answer.tokens_read == here.held > 0
    here.watch(24)
    assert not here.ask().degraded
    assert here.lost == before


def test_redis_that_stalls_costs_its_deadline_once_and_nothing_is_lost(site: Make, own_redis: RedisServer) -> None:
    own_redis.start()
    here = site(own_redis, host_bytes=SMALL, deadline_s=SHORT_S)
    here.watch(40)
    held = here.held
    own_redis.freeze()
    assert here.ask().degraded
    assert "redis" in here.trouble()
    # Few enough that the host can hold what Redis does not take.
    here.watch(4)
    own_redis.thaw()
    here.recovered()
    answer = here.ask()
    assert not answer.degraded
    assert answer.tokens_read == here.held > held
    assert here.lost == 0


def test_redis_that_is_full_says_so_and_takes_the_rest_when_it_has_room(site: Make, own_redis: RedisServer) -> None:
    own_redis.start("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    here = site(own_redis)
    used = own_redis.client.info("memory")["used_memory"]
    own_redis.client.config_set("maxmemory", used + 400_000)
    here.watch(60)
    assert "redis: the server is full" in here.trouble()
    assert here.bank.get_memory("cam")[0].recent
    answer = here.ask()
    assert not answer.degraded, "what it did not take waits"
    own_redis.client.config_set("maxmemory", 0)
    here.recovered()
    here.tiers.upper.drop("cam")
    assert not here.ask().degraded
    assert here.lost == 0


def test_an_open_camera_that_sees_nothing_is_not_forgotten(site: Make, redis_server: RedisServer) -> None:
    here = site()
    here.watch(24)
    here.leave()
    for name in redis_server.names():
        redis_server.client.expire(name, 60)
    # Its time to live is 600 s.
    other = site()
    other.tend()
    assert len(redis_server.names()) > 3
    for name in redis_server.names():
        assert redis_server.client.ttl(name) > 60


def test_frames_that_wait_are_written_while_no_frame_comes(site: Make, own_redis: RedisServer) -> None:
    here = site(own_redis)
    here.watch(24)
    memory, _ = here.bank.get_memory("cam")
    frames = memory.frames
    assert len(memory.recent) == frames > 3
    own_redis.start()
    until(lambda: here.tiers.lowest.state().up)
    here.tend()
    assert not memory.recent
    assert memory.frames == frames
    assert own_redis.client.exists("sightline:kv:manifest:cam")


def test_damaged_and_truncated_blocks_are_lost_and_the_rest_answers(site: Make, redis_server: RedisServer) -> None:
    here = site()
    here.watch(24)
    here.tend()
    held = here.held
    memory, _ = here.bank.get_memory("cam")
    keys = [key_of(memory, 0, 0, 0), key_of(memory, 1, 0, 1)]
    flipped, cut = (f"sightline:kv:kv:cam:{key.layer}:{key.head}:{key.block}" for key in keys)
    data = bytearray(redis_server.client.get(flipped))
    data[len(data) // 2] ^= 1
    redis_server.client.set(flipped, bytes(data))
    redis_server.client.set(cut, redis_server.client.get(cut)[:-5])
    gone = int(memory.heads[0][0].table.count[0]) + int(memory.heads[1][0].table.count[1])
    here.tiers.upper.drop("cam")
    answer = here.ask()
    assert answer.degraded
    assert answer.tokens_read == held - gone
    here.tend()
    assert here.lost == gone
    assert here.tiers.lowest.state().counts["damaged"] == 2
    answer = here.ask()
    assert not answer.degraded
    assert answer.tokens_read == held - gone == here.held
    here.watch(8)


# -- what another left ----------------------------------------------------------------------------
def leave_foreign(server: RedisServer) -> set[str]:
    """Another model's memory of the same camera, with more blocks than ours will have."""
    tier = redis_tier(server.url, "another-model")
    block = Block(torch.zeros(2, 8), torch.zeros(2, 8), *[torch.zeros(2, dtype=torch.int32)] * 2)
    keys = [BlockKey("cam", 0, 0, number) for number in (0, 7, 123_456)]
    assert set(tier.store([(key, block) for key in keys])) == {Outcome.HIT}
    assert tier.put_manifest("cam", b"theirs") is Outcome.HIT
    tier.close()
    return {name for name in server.names() if ":kv:cam:" in name}


def test_another_models_memory_is_not_gone_on_with_and_leaves_its_room(site: Make, redis_server: RedisServer) -> None:
    theirs = leave_foreign(redis_server)
    assert len(theirs) == 3
    here = site()
    here.tend()
    assert not theirs & redis_server.names()
    here.watch(24)
    assert here.bank.get_memory("cam")[0].frames > 0
    assert not here.ask().degraded


def test_what_a_tier_could_not_be_asked_about_at_the_start_is_taken_up_when_it_can(
    site: Make, own_redis: RedisServer
) -> None:
    own_redis.start()
    first = site(own_redis)
    first.watch(40)
    first.leave()
    reopened = first.bank.get_memory("cam")[0]
    held = reopened.tokens
    names = own_redis.names()
    own_redis.freeze()
    second = site(own_redis, deadline_s=SHORT_S)
    second.watch(8)
    assert "redis" in second.trouble()
    memory, _ = second.bank.get_memory("cam")
    waiting = memory.tokens
    assert memory.frames < 8
    own_redis.thaw()
    until(lambda: second.tiers.lowest.state().up)
    assert own_redis.names() == names, "nothing is deleted before it was asked"
    second.recovered()
    assert memory.tokens == held + waiting
    second.tiers.upper.drop("cam")
    answer = second.ask()
    assert not answer.degraded
    assert answer.tokens_read == second.held >= held
    assert second.lost == 0


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "another organiser": lambda header: header.update(organiser="mosaic"),
    "another seed": lambda header: header.update(organiser_options={"seed": 1}),
    "an organiser that there is not": lambda header: header.update(organiser="os"),
    "a type that is none": lambda header: header.update(dtype="load"),
    "another type": lambda header: header.update(dtype="float16"),
    "more layers": lambda header: header.update(layers=header["layers"] + 1),
    "heads of another number": lambda header: header.update(heads=header["heads"] * 2, layers=header["layers"] // 2),
    "another width": lambda header: header.update(width=header["width"] * 2),
    "another head's index": lambda header: header.update(parts=header["parts"][::-1]),
    "no index": lambda header: header.pop("parts"),
    "blocks that are no numbers": lambda header: header.update(parts=[["a"]] * len(header["parts"])),
    "times of fewer frames": lambda header: header["log"]["times"].pop(),
    "nonsense in the log": lambda header: header["log"].update(end=1),
}


@pytest.fixture(scope="module")
def remembered(model: VisionLanguageModel, shared_redis: RedisServer) -> dict[str, bytes]:
    """What a camera left in Redis, by name."""
    shared_redis.client.flushall()
    first = Site(model, shared_redis.url)
    first.watch(24)
    first.leave()
    first.tiers.close()
    return {name: shared_redis.client.dump(name) for name in shared_redis.names()}


@pytest.mark.parametrize("wrong", [*WRONG, "version", "cut"])
def test_a_manifest_that_cannot_be_gone_on_with_costs_its_streams_past_and_no_more(
    remembered: dict[str, bytes], site: Make, redis_server: RedisServer, model: VisionLanguageModel, wrong: str
) -> None:
    for name, dumped in remembered.items():
        redis_server.client.restore(name, 0, dumped)
    tier = redis_tier(redis_server.url, NativeEngine(model).fingerprint)
    _, data = tier.manifest("cam")
    assert data is not None
    loaded = load_manifest(data)
    assert loaded is not None
    if wrong in WRONG:
        WRONG[wrong](loaded[0])
    data = dump_manifest(*loaded)
    if wrong == "version":
        data = data.replace(rb"\"version\": 7", rb"\"version\": 6")
    tier.put_manifest("cam", data[:-40] if wrong == "cut" else data)
    left = set(tier.list_blocks("cam")[1])
    tier.close()
    assert left
    second = site()
    memory, _ = second.bank.get_memory("cam")
    assert memory.tokens == 0
    assert memory.counts.unreadable == (wrong != "another head's index")
    second.tend()
    assert not left & set(second.tiers.lowest.list_blocks("cam")[1])
    assert second.watch(12) > 1
    assert not second.ask().degraded


def test_a_memory_that_is_lost_while_its_camera_is_away_is_counted(site: Make, own_redis: RedisServer) -> None:
    own_redis.start()
    here = site(own_redis)
    here.watch(24)
    here.leave()
    kept = here.bank.memory_reports()["cam"].frames
    own_redis.kill()
    own_redis.start()
    before = LOST["frames"]
    with pytest.raises(NotReadyError, match="has no memory: nothing was recorded since its memory was deleted or lost"):
        here.ask()
    assert LOST["frames"] - before == kept > 0
    assert here.bank.memory_reports() == {}


# -- letting go, and forgetting -------------------------------------------------------------------
def test_a_camera_that_ended_is_remembered_and_one_that_was_removed_is_not(
    site: Make, redis_server: RedisServer
) -> None:
    here = site()
    here.watch(24)
    read = here.bank.memory_reports()["cam"].frames
    here.leave()
    assert here.bank.memory_reports()["cam"].frames >= read, "the list still tells of it"
    assert answered(here.engine).tokens_read > 0
    here.engine.delete_memory("cam")
    assert redis_server.names() == set()
    assert here.tiers.usage("cam") == {"host": 0, "redis": 0}
    with pytest.raises(NotReadyError, match="has no memory: nothing was recorded since its memory was deleted"):
        here.ask()
    assert here.bank.memory_reports() == {}


def test_what_was_prepared_is_gone_on_with_unless_it_was_forgotten_since(site: Make) -> None:
    here = site()
    here.watch(24)
    held, memory = here.held, here.spec.memory
    for forgotten in (False, True):
        here.leave()
        here.bank.prepare_stream("cam", memory)
        if forgotten:
            here.bank.delete_memory("cam")
        assert here.bank.open_stream("cam", memory) is None, "released without its window"
        # With what was in the window.
        assert here.held == 0 if forgotten else here.held > held
        here.engine.admit(here.spec)


def test_what_was_prepared_and_never_opened_is_dropped(site: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its decoder has left meanwhile: the camera is another replica's."""
    here = site()
    here.watch(24)
    held, now_s = here.held, time.monotonic()
    here.leave()
    here.bank.prepare_stream("cam", here.spec.memory)
    here.tend()
    assert here.bank._prepared.keys() == {"cam"}
    monkeypatch.setattr("cluster.memory.bank.time", SimpleNamespace(monotonic=lambda: now_s + 600.0))
    here.tend()
    assert not here.bank._prepared
    assert here.bank.open_stream("cam", here.spec.memory) is None, "released without its window"
    assert here.held > held


def commands(server: RedisServer) -> int:
    """How many the server has got, but those that ask for it."""
    stats = server.client.info("commandstats")
    return sum(each["calls"] for name, each in stats.items() if name != "cmdstat_info")


@pytest.mark.parametrize("ending", ["last write waits", "asked about"])
def test_a_camera_that_was_prepared_is_opened_without_the_tiers(
    site: Make, redis_server: RedisServer, ending: str
) -> None:
    here = site()
    here.watch(24)
    held, memory = here.held, here.spec.memory
    if ending == "asked about":
        here.leave()
        answered(here.engine)
    else:
        # No thread does it.
        here.bank.writer = MemoryWriter(lambda stream: None)
        here.engine.evict("cam")
    here.bank.prepare_stream("cam", memory)
    before = commands(redis_server)
    here.bank.open_stream("cam", memory)
    assert commands(redis_server) == before
    assert here.held > held


def test_a_camera_without_a_memory_is_opened_without_the_tiers(site: Make, redis_server: RedisServer) -> None:
    first = site()
    first.watch(24)
    first.leave()
    second = MemoryBank(first.tiers)
    second.prepare_stream("cam", None)
    assert redis_server.names() == set()
    before = commands(redis_server)
    assert second.open_stream("cam", None) is None
    assert commands(redis_server) == before


def test_a_removed_camera_is_deleted_without_being_read(site: Make, redis_server: RedisServer) -> None:
    here = site()
    here.watch(24)
    here.leave()
    known = here.bank.memory_reports()["cam"]
    redis_server.client.config_resetstat()
    assert here.bank.delete_memory("cam").result() == DeletedMemory(known.frames, known.nbytes)
    assert redis_server.names() == set()
    read = redis_server.client.info("commandstats")
    assert not {"cmdstat_get", "cmdstat_mget"} & set(read)


def test_windows_are_not_copied_while_nothing_can_be_written(site: Make, own_redis: RedisServer) -> None:
    here = site(own_redis)
    copied = 0
    window = here.bank.window
    assert window is not None

    def counted(stream: str, has_room: Callable[[int], bool]) -> Callable[[], bytes] | None:
        nonlocal copied
        copied += 1
        return window(stream, has_room)

    here.bank.window = counted
    here.watch(24)
    here.tend()
    assert here.bank.get_memory("cam")[0].settle_due
    assert copied == 0
    own_redis.start()
    here.recovered()
    assert copied > 0


def test_few_copies_of_windows_wait_for_a_slow_writer(model: VisionLanguageModel) -> None:
    """A copy is on the device until it is serialised; a GPU has no room for those of all cameras."""
    bank = MemoryBank(TierStack([Arena(16 * MIB), Arena(512 * MIB, name="node", evicts=False)]))
    engine = NativeEngine(model, max_new_tokens=1, memories=bank)
    window, most, copies = bank.window, MAX_SNAPSHOTS + THREADS, 0
    assert window is not None

    def counted(stream: str, has_room: Callable[[int], bool]) -> Callable[[], bytes]:
        nonlocal copies
        dump = window(stream, has_room)
        assert dump is not None
        copies += 1

        def serialise() -> bytes:
            nonlocal copies
            copies -= 1
            return dump()

        return serialise

    bank.window = counted
    names = [f"cam {number}" for number in range(2 * most)]
    for name in names:
        engine.admit(stream(name, cap_bytes=16 * MIB))
    memories = [bank.get_memory(name)[0] for name in names]
    camera = SyntheticCamera("cam", model.geometry, anchor_every=4)
    with contextlib.ExitStack() as slow:
        for memory in memories:
            slow.enter_context(memory.exclusive)
        for number in range(16):
            for name in names:
                engine.step(engine.push(dataclasses.replace(camera.sample(number), stream=name)))
        assert all(memory.settle_due for memory in memories)
        assert 0 < copies <= most
        saved = [engine.hand_over(name) for name in names]
        assert copies <= 2 * most
    assert all(each.result(60.0) for each in saved)


def test_forgetting_an_open_camera_and_letting_it_go_leaves_nothing(site: Make, redis_server: RedisServer) -> None:
    here = site()
    here.watch(24)
    here.engine.delete_memory("cam")
    here.leave()
    here.tend()
    assert redis_server.names() == set()
    assert here.bank.memory_reports() == {}


@pytest.mark.parametrize("prepared", [False, True])
def test_a_closed_camera_that_is_opened_at_once_stays_forgotten_in_part(site: Make, prepared: bool) -> None:
    here = site()
    here.watch(24)
    here.leave()
    go = threading.Event()

    def late(stream: str) -> None:
        assert go.wait(30.0)
        MemoryBank._write(here.bank, stream)

    here.bank.writer = MemoryWriter(late)
    newest = here.bank.get_memory("cam")[0].newest
    assert newest is not None
    deletion = here.bank.delete_memory("cam", 8.0)
    if prepared:
        here.bank.prepare_stream("cam", here.spec.memory)
    here.bank.open_stream("cam", here.spec.memory)
    memory, _ = here.bank.get_memory("cam")
    oldest = min(memory.log.frame_time(int(head.frame.min())) for _, _, head in memory.iter_heads())
    assert oldest >= newest - 8_000_000
    go.set()
    assert deletion.result(30.0).frames > 0


@pytest.mark.parametrize("default", [None, stream(organiser="frames").memory])
def test_a_memory_of_other_settings_is_not_deleted_whole_where_a_part_is_to_be_forgotten(
    site: Make, redis_server: RedisServer, default: MemorySpec | None
) -> None:
    here = site()
    here.watch(24)
    here.leave()
    names = redis_server.names()
    tiers = TierStack([redis_tier(redis_server.url, here.engine.fingerprint)])
    restarted = MemoryBank(tiers, default=default)
    with pytest.raises(NotReadyError, match="has a memory of other settings"):
        restarted.delete_memory("cam", 3600.0)
    assert redis_server.names() == names
    restarted.delete_memory("cam").result()
    assert redis_server.names() == set()
    assert restarted.delete_memory("cam", 3600.0).result() == DeletedMemory(0, 0)
    tiers.close()


def test_what_is_forgotten_while_redis_is_down_is_gone_when_it_is_back(site: Make, own_redis: RedisServer) -> None:
    own_redis.start()
    here = site(own_redis, deadline_s=SHORT_S)
    here.watch(24)
    here.tend()
    assert own_redis.names()
    own_redis.freeze()
    with pytest.raises(UnavailableError, match="not deleted in every tier"):
        here.engine.delete_memory("cam").result()
    assert here.tiers.deleting == {"cam"}
    with pytest.raises(NotReadyError, match="has no memory yet"):
        here.ask()
    own_redis.thaw()
    here.recovered()
    assert own_redis.names() == set()


def test_a_memory_that_is_switched_off_is_forgotten_also_from_before(site: Make, redis_server: RedisServer) -> None:
    first = site()
    first.watch(24)
    first.leave()
    second = MemoryBank(first.tiers, default=stream().memory)
    assert second.open_stream("cam", None) is None
    assert redis_server.names() == set()
    with pytest.raises(NotReadyError, match=r"memory\.enabled"):
        second.get_memory("cam")


def test_memories_at_hand_for_questions_are_bounded(
    model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.memory.bank.MAX_REOPENED", 2)
    tiers = TierStack([Arena(16 * MIB, slab_bytes=64 * 1024)])
    bank = MemoryBank(tiers)
    engine = NativeEngine(model, memories=bank)
    here = Site(model, None)
    names = [f"cam-{number}" for number in range(5)]
    chunks: list[KVChunk] = []
    here.engine._kv_sink = chunks.append
    here.engine._streams["cam"].kv_sink = chunks.append
    here.watch(16)
    for name in names:
        bank.open_stream(name, stream(name).memory)
        for chunk in chunks[:4]:
            bank.accept_chunk(dataclasses.replace(chunk, stream=name))
        bank.release_stream(name)
    assert bank.streams() == []
    for name in names:
        assert answered(engine, name).tokens_read > 0
    assert len(bank.streams()) == 2
    assert set(bank.memory_reports()) == set(names), "the list tells of all of them"
    # A stream that is opened again begins with what the tiers say, whoever wrote it.
    bank.open_stream(names[-1], stream().memory)
    assert bank.get_memory(names[-1])[0].frames == 4
    bank.open_stream(names[0], stream().memory)
    assert bank.get_memory(names[0])[0].frames == 4


# -- questions meanwhile --------------------------------------------------------------------------
def test_two_questions_at_once_are_answered_as_one_after_the_other(site: Make) -> None:
    here = site()
    here.watch(24)
    specs = [AskSpec("cam", "What happened?", max_new_tokens=6), AskSpec("cam", "Why?", max_new_tokens=6, since_s=12)]
    wanted = []
    for spec in specs:
        run = here.engine.ask(spec)
        while run.step() is not None:
            pass
        wanted.append((run.result.text, run.result.moments, run.result.tokens_read))
    runs = [here.engine.ask(spec) for spec in specs]
    busy = list(runs)
    while busy:
        busy = [run for run in busy if run.step() is not None]
    assert [(run.result.text, run.result.moments, run.result.tokens_read) for run in runs] == wanted


@pytest.mark.parametrize("event", ["windows", "evict", "forget", "forget in part"])
def test_an_answer_under_way_ends_as_it_began_whatever_happens_to_the_camera(site: Make, event: str) -> None:
    here = site()
    here.watch(24)
    spec = AskSpec("cam", "What happened?", max_new_tokens=4)
    wanted = here.engine.ask(spec)
    while wanted.step() is not None:
        pass
    run = here.engine.ask(spec)
    run.step()
    if event == "windows":
        here.watch(8)
    elif event == "evict":
        here.leave()
    elif event == "forget":
        here.engine.delete_memory("cam")
    else:
        assert here.engine.delete_memory("cam", 12.0).result(30.0).frames > 0
    while run.step() is not None:
        pass
    same = dict.fromkeys(("first_token_s", "total_s"), 0.0)
    assert dataclasses.replace(run.result, **same) == dataclasses.replace(wanted.result, **same)  # type: ignore[arg-type]


def test_a_camera_that_has_seen_nothing_says_so(site: Make) -> None:
    here = site()
    with pytest.raises(NotReadyError, match="has no memory yet"):
        here.ask()
    here.watch(1)
    with pytest.raises(NotReadyError, match="has no memory yet"):
        here.ask()


def test_a_process_that_ends_while_memories_are_written_ends_as_if_none_were() -> None:
    """A thread that is ended inside of torch would abort it."""
    script = """
import threading
import torch
from cluster.memory.writer import MAX_SNAPSHOTS, THREADS, MemoryWriter
began = threading.Event()
def work(stream):
    began.set()
    for _ in range(5_000):
        torch.zeros(64).new_zeros(64).add_(1)
    print("written", flush=True)
writer = MemoryWriter(work)
for stream in ("yard", "gate"):
    writer.schedule(stream)
began.wait(30.0)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "written" in ended.stdout
