"""Memories while their tiers fail: windows go on as without a memory, questions are answered from what is in reach, and
what comes back comes back without a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from redis_server import RedisServer
from remembering import MIB, Site, answered, redis_tier, stream, until

from cluster.engine.native import NativeEngine
from cluster.errors import NotReadyError
from cluster.memory.bank import MemoryBank
from cluster.memory.chunk import KVChunk
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel
from cluster.types import AskSpec

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

    def make(server: RedisServer | None = None, **options: int) -> Site:
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
    assert here.tiers.dirty > 0
    answer = here.ask()
    assert not answer.degraded, "the host holds all of it"
    assert answer.tokens_read == here.held > 0
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
        return here.bank.repair.written > 0

    until(rewritten)
    here.recovered()
    assert own_redis.client.exists("sightline:kv:manifest:cam")
    assert here.ask().degraded, "the rest is gone"
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
    here = site(own_redis, host_bytes=SMALL)
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
    assert here.tiers.dirty > 0
    answer = here.ask()
    assert not answer.degraded, "what it did not take is held above"
    assert answer.tokens_read == here.held
    own_redis.client.config_set("maxmemory", 0)
    here.recovered()
    here.tiers.upper.drop("cam")
    assert not here.ask().degraded
    assert here.lost == 0


def test_dirty_blocks_are_written_while_no_frame_comes(site: Make, own_redis: RedisServer) -> None:
    here = site(own_redis)
    here.watch(24)
    settled = here.bank.get("cam")[0].counts.settled
    dirty = here.tiers.dirty
    own_redis.start()
    until(lambda: here.tiers.lowest.state().up)
    assert here.bank.flush() == dirty
    assert here.tiers.dirty == 0
    assert here.bank.get("cam")[0].counts.settled == settled
    assert own_redis.client.exists("sightline:kv:manifest:cam")


def test_damaged_and_truncated_blocks_are_lost_and_the_rest_answers(site: Make, redis_server: RedisServer) -> None:
    here = site()
    here.watch(40)
    here.tend()
    held = here.held
    names = sorted(name for name in redis_server.names() if ":kv:cam:" in name)
    flipped, cut = names[0], names[len(names) // 2]
    data = bytearray(redis_server.client.get(flipped))
    data[len(data) // 2] ^= 1
    redis_server.client.set(flipped, bytes(data))
    redis_server.client.set(cut, redis_server.client.get(cut)[:-5])
    keys = [BlockKey("cam", *map(int, name.split(":")[-3:])) for name in (flipped, cut)]
    memory, _ = here.bank.get("cam")
    gone = sum(int((memory.heads[key.layer][key.head].uids() == key.block).sum()) for key in keys)
    here.tiers.upper.drop("cam")
    answer = here.ask()
    assert answer.degraded
    assert answer.tokens_read == held - gone
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
    assert not theirs & redis_server.names()
    here.watch(24)
    assert here.bank.get("cam")[0].frames > 0
    assert not here.ask().degraded


def test_what_a_tier_could_not_be_asked_about_does_not_come_back_later(site: Make, own_redis: RedisServer) -> None:
    """A memory that began anew and the one before it have blocks of the same names."""
    own_redis.start()
    first = site(own_redis)
    first.watch(40)
    first.engine.evict("cam")
    assert own_redis.names()
    own_redis.freeze()
    second = site(own_redis)
    assert "redis" in second.trouble()
    own_redis.thaw()
    second.recovered()
    assert not {name for name in own_redis.names() if ":kv:cam:" in name}
    second.watch(24)
    second.tiers.upper.drop("cam")
    answer = second.ask()
    assert not answer.degraded
    assert answer.tokens_read == second.held > 0


def test_a_manifest_that_cannot_be_read_costs_its_streams_past_and_no_more(site: Make) -> None:
    first = site()
    first.watch(24)
    first.engine.evict("cam")
    # Of the right model and form, and of an organiser whose state has other parts: an older release wrote it.
    _, data = first.tiers.manifest("cam")
    assert data is not None
    first.tiers.put_manifest("cam", data.replace(b"table.mean", b"table.nean"))
    second = site()
    assert second.bank.get("cam")[0].frames == 0
    assert second.watch(24) > 4
    assert not second.ask().degraded


# -- letting go, and forgetting -------------------------------------------------------------------
def test_a_camera_that_ended_is_remembered_and_one_that_was_removed_is_not(
    site: Make, redis_server: RedisServer
) -> None:
    here = site()
    here.watch(24)
    read = here.bank.report()["cam"].frames
    here.engine.evict("cam")
    assert here.bank.report()["cam"].frames >= read, "the list still tells of it"
    assert answered(here.engine).tokens_read > 0
    here.engine.forget("cam")
    assert redis_server.names() == set()
    assert here.tiers.usage("cam") == {"host": 0, "redis": 0}
    with pytest.raises(NotReadyError, match="remembers nothing"):
        here.ask()
    assert here.bank.report() == {}


def test_forgetting_an_open_camera_and_letting_it_go_leaves_nothing(site: Make, redis_server: RedisServer) -> None:
    here = site()
    here.watch(24)
    here.engine.forget("cam")
    here.engine.evict("cam")
    here.tend()
    assert redis_server.names() == set()
    assert here.bank.report() == {}


def test_what_is_forgotten_while_redis_is_down_is_gone_when_it_is_back(site: Make, own_redis: RedisServer) -> None:
    own_redis.start()
    here = site(own_redis)
    here.watch(24)
    here.tend()
    assert own_redis.names()
    own_redis.freeze()
    here.engine.forget("cam")
    assert here.tiers.owed()["redis"] == 1
    with pytest.raises(NotReadyError, match="nothing to remember yet"):
        here.ask()
    own_redis.thaw()
    here.recovered()
    assert own_redis.names() == set()


def test_a_memory_that_is_switched_off_is_forgotten_also_from_before(site: Make, redis_server: RedisServer) -> None:
    first = site()
    first.watch(24)
    first.engine.evict("cam")
    second = MemoryBank(first.tiers, default=stream().memory)
    assert second.open("cam", None) is None
    assert redis_server.names() == set()
    with pytest.raises(NotReadyError, match=r"memory\.enabled"):
        second.get("cam")


def test_memories_at_hand_for_questions_are_bounded_and_what_they_changed_is_saved(
    model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.memory.bank.VISITED", 2)
    tiers = TierStack([Arena(16 * MIB)])
    bank = MemoryBank(tiers)
    engine = NativeEngine(model, memories=bank)
    here = Site(model, None)
    names = [f"cam-{number}" for number in range(5)]
    chunks: list[KVChunk] = []
    here.engine._leave = chunks.append
    here.engine._streams["cam"].leave = chunks.append
    here.watch(16)
    for name in names:
        bank.open(name, stream(name).memory)
        for chunk in chunks[:4]:
            bank.take(dataclasses.replace(chunk, stream=name))
        bank.release(name)
    assert bank.streams() == []
    for name in names:
        assert answered(engine, name).tokens_read > 0
    assert len(bank.streams()) == 2
    assert set(bank.report()) == set(names), "the list tells of all of them"
    # A stream that is opened again begins with what the tiers say, whoever wrote it.
    bank.open(names[-1], stream().memory)
    assert bank.get(names[-1])[0].frames == 4
    bank.open(names[0], stream().memory)
    assert bank.get(names[0])[0].frames == 4


# -- questions meanwhile --------------------------------------------------------------------------
def test_two_questions_at_once_are_answered_as_one_after_the_other(site: Make) -> None:
    here = site()
    here.watch(40)
    specs = [AskSpec("cam", "What happened?", max_new_tokens=6), AskSpec("cam", "Why?", max_new_tokens=6, since_s=20)]
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
    here.watch(40)
    spec = AskSpec("cam", "What happened?", max_new_tokens=6)
    wanted = here.engine.ask(spec)
    while wanted.step() is not None:
        pass
    run = here.engine.ask(spec)
    run.step()
    if event == "windows":
        here.watch(24)
    elif event == "evict":
        here.engine.evict("cam")
    elif event == "forget":
        here.engine.forget("cam")
    else:
        assert here.engine.forget("cam", 12.0).frames > 0
    while run.step() is not None:
        pass
    same = dict.fromkeys(("first_token_s", "total_s"), 0.0)
    assert dataclasses.replace(run.result, **same) == dataclasses.replace(wanted.result, **same)  # type: ignore[arg-type]


def test_a_camera_that_has_seen_nothing_says_so(site: Make) -> None:
    here = site()
    with pytest.raises(NotReadyError, match="nothing to remember yet"):
        here.ask()
    here.watch(1)
    with pytest.raises(NotReadyError, match="nothing to remember yet"):
        here.ask()
