"""Frames of the next step, which a GPU gets behind the scores of the current one and before its answers are out."""

import pytest

from cluster.engine.native import NativeEngine
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.types import MemorySpec

STREAMS = ("a", "b")


@pytest.fixture
def cameras(make_camera):
    return {name: make_camera(stream=name) for name in STREAMS}


@pytest.fixture
def requests_of(engine, cameras, make_spec):
    """Windows of the cameras, by stride, of which nothing was stepped."""
    for name in STREAMS:
        engine.admit(make_spec(name))

    def push(first: int):
        return [r for index in (first, first + 1) for c in cameras.values() for r in engine.push(c.sample(index))]

    return push


@pytest.fixture
def engine(model) -> NativeEngine:
    engine = NativeEngine(model)
    engine.launches_return = True
    return engine


def encoded(engine: NativeEngine, name: str) -> list[bool]:
    return [frame.tokens is not None for frame in engine._streams[name].frames]


def outcome(answers):
    return [(answer.stream, answer.score, answer.tokens) for answer in answers]


def test_frames_of_the_next_step_are_encoded_once_the_scores_are_read(engine, requests_of, monkeypatch) -> None:
    first, second = requests_of(0)
    seen = []
    read, commit = engine._read, engine._commit
    monkeypatch.setattr(engine, "_read", lambda *given: (read(*given), seen.append(encoded(engine, "b")))[0])
    monkeypatch.setattr(engine, "_commit", lambda *given: seen.append(encoded(engine, "b")) or commit(*given))
    engine.step([first], [second])
    assert seen == [[False, False], [True, True]]
    engine.step([second])
    assert len(seen) == 4


def test_a_memory_is_shown_queries_before_the_device_gets_the_next_step(model, cameras, make_spec, monkeypatch) -> None:
    """Read behind those frames, they would come, and the answers with them, once the tower has them."""
    engine = NativeEngine(model, memories=MemoryBank(TierStack([Arena(2**26)])))
    engine.launches_return = True
    for name in STREAMS:
        engine.admit(make_spec(name, memory=MemorySpec(compressor="snapkv")))
    first, second = [r for index in range(2) for c in cameras.values() for r in engine.push(c.sample(index))]
    seen = []
    observe = engine.memories.observe_queries

    def observed(stream, queries):
        seen.append((stream, len(queries), encoded(engine, "b")))
        observe(stream, queries)

    monkeypatch.setattr(engine.memories, "observe_queries", observed)
    engine.step([first], [second])
    assert seen == [("a", len(model.layers), [False, False])]
    assert encoded(engine, "b") == [True, True]


def test_answers_and_counts_are_those_of_steps_alone(engine, model, cameras, make_spec, requests_of) -> None:
    alone = NativeEngine(model)
    for name in STREAMS:
        alone.admit(make_spec(name))
    for index in range(0, 12, 2):
        first, second = requests_of(index)
        together = outcome(engine.step([first], [second]))
        flops = engine.stats.tower_flops
        together += outcome(engine.step([second]))
        flops += engine.stats.tower_flops
        expected, work = [], 0
        for request in [r for i in (index, index + 1) for c in cameras.values() for r in alone.push(c.sample(i))]:
            expected += outcome(alone.step([request]))
            work += alone.stats.tower_flops
        assert together == expected
        assert flops == work
        assert all(tokens.encoded for _, _, tokens in together)


def test_a_step_that_fails_leaves_the_next_one_alone(
    engine, model, cameras, make_spec, requests_of, monkeypatch
) -> None:
    first, second = requests_of(0)
    read = engine._read

    def fail(*_):
        raise RuntimeError("the scores are lost")

    monkeypatch.setattr(engine, "_read", fail)
    with pytest.raises(RuntimeError, match="scores are lost"):
        engine.step([first], [second])
    monkeypatch.setattr(engine, "_read", read)
    alone = NativeEngine(model)
    alone.admit(make_spec("b"))
    (expected,) = [r for index in range(2) for r in alone.push(cameras["b"].sample(index))]
    assert outcome(engine.step([second])) == outcome(alone.step([expected]))


def test_frames_that_cannot_be_encoded_fail_in_their_own_step(engine, requests_of, monkeypatch) -> None:
    first, second = requests_of(0)
    encode = engine._encode_frames

    def fail(frames):
        if any(frame in engine._streams["b"].frames for frame in frames):
            raise RuntimeError("a torn frame")
        return encode(frames)

    monkeypatch.setattr(engine, "_encode_frames", fail)
    assert [answer.stream for answer in engine.step([first], [second])] == ["a"]
    with pytest.raises(RuntimeError, match="torn frame"):
        engine.step([second])


def test_a_cpu_answers_first(model, cameras, make_spec) -> None:
    engine = NativeEngine(model)
    for name in STREAMS:
        engine.admit(make_spec(name))
    first, second = [r for index in range(2) for c in cameras.values() for r in engine.push(c.sample(index))]
    engine.step([first], [second])
    assert encoded(engine, "b") == [False, False]
