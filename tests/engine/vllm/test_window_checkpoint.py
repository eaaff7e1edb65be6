"""What outlives a process of its windows: manifests there and back, in order, cancelled, refused and cleared."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.vllm import window_checkpoint
from cluster.engine.vllm.settings import tier_fingerprint
from cluster.engine.vllm.window_checkpoint import ManifestWriter, WindowCheckpoints
from cluster.engine.window.export import Snapshot
from cluster.memory.manifest import read_header
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.types import StreamSpec

GATE = StreamSpec("gate", (), life="1")


class Shared(Arena):
    """A tier that others reach too, and that can be down, or uncertain of some streams' deletion."""

    down = False
    stuck: Collection[str] = ()

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        return None if stream in self.stuck else super().drop(stream, keys)

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        return Outcome.RETRY if self.down else super().put_manifest(stream, manifest)


def shared() -> Shared:
    return Shared(2**22, name="node", slab_bytes=2**16)


def stack(*below: Arena) -> TierStack:
    return TierStack([Arena(2**22, name="host", slab_bytes=2**16), *below])


def state(name: str) -> Snapshot:
    """A window's state, told from others by its name."""
    return Snapshot({"name": name, "life": GATE.life}, {"kv": torch.zeros(2)})


def name_of(window: bytes | None) -> str:
    assert window is not None
    return str(read_header(window)["name"])


@contextmanager
def keeper(tiers: TierStack) -> Iterator[WindowCheckpoints]:
    checkpoints = WindowCheckpoints(tiers)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


@given(st.binary(max_size=60), st.integers(0, 200))
def test_what_is_no_manifest_of_ours_is_nothing(noise: bytes, cut: int) -> None:
    whole = Snapshot({"writer": "a"}, {}).dump()
    end = min(cut, whole.rindex(b"}"))
    node = shared()
    with keeper(stack(node)) as here:
        for each in (noise, whole[:end], Snapshot({}, {}).dump()):
            node.put_manifest("gate", each)
            assert here.find_window(GATE) is None


def test_another_process_finds_a_window_and_its_writer_does_not() -> None:
    node = shared()
    with keeper(stack(node)) as here, keeper(stack(node)) as there:
        assert there.find_window(GATE) is None
        assert here.queue_window("gate", state("first"))
        assert here.queue_window("gate", state("second"))
        assert here.writer.wait_stream_written("gate", 10)
        assert here.find_window(GATE) is None
        assert name_of(there.find_window(GATE)) == "second"
        assert there.find_window(replace(GATE, life="2")) is None, "it was removed, and added again"
        there.writer.delete_stream("gate", "2")
        assert name_of(there.find_window(GATE)) == "second"
        there.writer.delete_stream("gate", "1")
        assert there.find_window(GATE) is None


def test_a_window_is_handed_over_only_where_others_find_it() -> None:
    node = shared()
    with keeper(stack()) as alone:
        assert not alone.hand_over("gate", state("window"))
    with keeper(stack(node)) as here:
        assert here.hand_over("gate", state("window"))
        node.down = True
        assert not here.hand_over("gate", state("newer"))
        node.down = False
        # What the node could not take waits until it can.
        assert here.writer.wait_stream_written("gate", 10)
        assert name_of(node.manifest("gate")[1]) == name_of(here.writer.read_manifest("gate")) == "newer"


def test_a_window_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_checkpoint, "MAX_BYTES", 10)
    with keeper(stack(shared())) as here:
        assert not here.hand_over("gate", Snapshot({}, {"kv": torch.zeros(11, dtype=torch.int8)}))
        assert here.writer.read_manifest("gate") is None


def test_what_a_tier_cannot_take_is_tried_again_and_only_the_newest_waits() -> None:
    node = shared()
    node.down = True
    writer = ManifestWriter(node)
    made = []

    def written(number: int) -> bytes:
        made.append(number)
        return str(number).encode()

    try:
        for number in range(20):
            writer.queue_manifest("gate", partial(written, number))
        writer.queue_manifest("yard", lambda: b"yard")
        assert not writer.flush(0.2)
        assert writer.retries > 0
        node.down = False
        assert writer.flush(30)
        assert (node.manifest("gate")[1], node.manifest("yard")[1]) == (b"19", b"yard")
        # What a newer one replaced before it was written never became bytes.
        assert len(set(made)) <= 3
    finally:
        writer.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_window_that_cannot_be_serialised_does_not_end_the_writer(caplog: pytest.LogCaptureFixture) -> None:
    node = shared()
    writer = ManifestWriter(node)
    try:
        writer.queue_manifest("gate", lambda: bytes(1 // 0))
        assert writer.wait_stream_written("gate", 10)
        assert "camera gate: its window could not be written" in caplog.text
        writer.queue_manifest("gate", lambda: b"gate")
        assert writer.flush(10)
        assert node.manifest("gate")[1] == b"gate"
    finally:
        writer.close()


def test_a_deletion_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node, tried = shared(), []

    def drop(stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        tried.append(stream)
        if len(tried) == 1:
            raise OSError("out of luck")
        return Arena.drop(node, stream, keys)

    monkeypatch.setattr(node, "drop", drop)
    writer = ManifestWriter(node)
    try:
        writer.queue_clear("gate")
        assert writer.flush(10)
        assert tried == ["gate", "gate"]
    finally:
        writer.close()


@pytest.mark.parametrize("end", ["cancel_stream", "delete_stream", "queue_clear"])
def test_what_waited_is_not_written_after_its_end(end: str) -> None:
    """Not even what was on its way when it ended, and is refused only afterwards."""
    node = shared()
    node.down = True
    writer = ManifestWriter(node)
    try:
        writer.queue_manifest("gate", lambda: b"late")
        deadline = time.monotonic() + 30
        while not writer.retries:
            assert time.monotonic() < deadline
        getattr(writer, end)("gate")
        node.down = False
        writer.queue_manifest("yard", lambda: b"yard")
        assert writer.wait_stream_written("yard", 30)
        assert writer.flush(30)
        assert node.manifest("gate") == (Outcome.MISS, None)
    finally:
        writer.close()


def test_what_is_of_no_use_is_dropped_before_anything_new_is_written() -> None:
    node = shared()
    place = torch.zeros(4, dtype=torch.int32)
    old = BlockKey("gate", 0, 0, 1)
    node.store([(old, Block(torch.ones(4, 8), torch.ones(4, 8), place, place))])
    node.put_manifest("gate", b"of another engine")
    with keeper(stack(node)) as here:
        assert here.find_window(GATE) is None
        here.discard_stale("gate")
        here.queue_window("gate", state("window"))
        assert here.writer.flush(30)
        assert node.list_blocks("gate") == (Outcome.HIT, [])
        assert name_of(node.manifest("gate")[1]) == "window"


def test_a_deletion_that_waits_holds_back_its_own_stream_only() -> None:
    node = shared()
    node.stuck = {"gate", "door"}
    writer = ManifestWriter(node)
    try:
        for stream in ("gate", "door"):
            writer.queue_clear(stream)
        writer.queue_manifest("gate", lambda: b"gate")
        for number in range(5):
            writer.queue_manifest("yard", str(number).encode)
            assert writer.wait_stream_written("yard", 10)
            assert node.manifest("yard")[1] == str(number).encode()
        # Nor does one deletion hold back another.
        node.stuck = {"gate"}
        assert writer.wait_stream_written("door", 10)
        assert node.manifest("gate") == (Outcome.MISS, None)
        node.stuck = set()
        assert writer.flush(30)
        assert node.manifest("gate")[1] == b"gate"
    finally:
        writer.close()


def test_windows_of_other_kv_are_told_apart() -> None:
    plain = tier_fingerprint("model", {"tensor_parallel_size": 2, "quantization": None})
    assert plain == tier_fingerprint("model", {})
    marks = {plain, "model", tier_fingerprint("other", {}), tier_fingerprint("model", {"quantization": "fp8"})}
    assert len(marks) == 4
