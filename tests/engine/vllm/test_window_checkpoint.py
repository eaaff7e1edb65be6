"""What outlives a process of its windows: manifests there and back, in order, cancelled, refused and cleared."""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.vllm.settings import tier_fingerprint
from cluster.engine.vllm.window_checkpoint import WindowCheckpoints
from cluster.engine.window.export import Snapshot
from cluster.memory.manifest import read_header
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.types import StreamSpec

GATE = StreamSpec("gate", (), life="1")


class Shared(Arena):
    """A tier that others reach too, and that can be down, slow (while not ``free``), or uncertain of some streams'
    deletion."""

    down = False
    stuck: Collection[str] = ()

    def __init__(self, nbytes: int = 2**22) -> None:
        super().__init__(nbytes, name="node", slab_bytes=2**16)
        self.asked, self.free = threading.Event(), threading.Event()
        self.free.set()
        self.put: list[tuple[str, bytes]] = []

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        return None if stream in self.stuck else super().drop(stream, keys)

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        self.asked.set()
        assert self.free.wait(30)
        self.put.append((stream, manifest))
        return Outcome.RETRY if self.down else super().put_manifest(stream, manifest)


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
    node = Shared()
    with keeper(stack(node)) as here:
        for each in (noise, whole[:end], Snapshot({}, {}).dump()):
            node.put_manifest("gate", each)
            assert here.find_window(GATE) is None


def test_another_process_finds_a_window_and_its_writer_does_not() -> None:
    node = Shared()
    with keeper(stack(node)) as here, keeper(stack(node)) as there:
        assert there.find_window(GATE) is None
        here.queue_window("gate", state("first"))
        here.queue_window("gate", state("second"))
        assert here.writer.wait_idle(10)
        assert here.find_window(GATE) is None
        assert name_of(there.find_window(GATE)) == "second"
        assert there.find_window(replace(GATE, life="2")) is None, "it was removed, and added again"
        there.delete_stream("gate", "2")
        assert name_of(there.find_window(GATE)) == "second"
        there.delete_stream("gate", "1")
        assert there.find_window(GATE) is None


def test_a_window_is_handed_over_only_where_others_find_it() -> None:
    node = Shared()
    with keeper(stack()) as alone:
        assert not alone.hand_over("gate", state("window"))
    with keeper(stack(node)) as here:
        here.queue_window("gate", state("older"))
        assert here.hand_over("gate", state("window"))
        assert name_of(node.manifest("gate")[1]) == "window"
        node.down = True
        assert not here.hand_over("gate", state("newer"))


def test_a_window_above_its_camera_s_cap_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Of a window of Qwen2.5-VL-7B, 16 MiB are the embeddings of 2,300 tokens."""
    large = Snapshot({"name": "large"}, {"embeds": torch.zeros(2**24, dtype=torch.uint8)})
    for cap in (2**25, 2**23):
        node = Shared(2**26)
        with keeper(stack(node)) as here:
            here.tiers.set_cap("gate", cap)
            for _ in range(2):
                here.queue_window("gate", large)
            assert here.writer.wait_idle(10)
            assert (here.read_manifest("gate") is not None) is (cap == 2**25)
            assert here.hand_over("gate", large) is (cap == 2**25)
    assert caplog.text.count("camera gate: its window of 16384 KiB exceeds its cap of 8192 KiB") == 1


def test_while_a_tier_is_slow_only_the_newest_window_waits() -> None:
    node = Shared()
    node.free.clear()
    with keeper(stack(node)) as here:
        here.queue_window("gate", state("0"))
        assert node.asked.wait(30)
        for number in range(1, 20):
            here.queue_window("gate", state(str(number)))
        here.queue_window("yard", state("yard"))
        node.free.set()
        assert here.writer.wait_idle(30)
        assert [name_of(manifest) for stream, manifest in node.put if stream == "gate"] == ["0", "19"]
        assert name_of(node.manifest("yard")[1]) == "yard"


def test_a_window_that_a_tier_does_not_take_is_replaced_after_the_next_step() -> None:
    node = Shared()
    node.down = True
    with keeper(stack(node)) as here:
        here.queue_window("gate", state("first"))
        assert here.writer.wait_idle(10)
        node.down = False
        here.queue_window("gate", state("second"))
        assert here.writer.wait_idle(10)
        assert name_of(node.manifest("gate")[1]) == "second"


def test_a_window_that_cannot_be_serialised_does_not_end_the_writer(caplog: pytest.LogCaptureFixture) -> None:
    node = Shared()
    with keeper(stack(node)) as here:
        here.queue_window("gate", Snapshot({"strange": object()}, {}))
        assert here.writer.wait_idle(10)
        assert "camera 'gate' could not be written" in caplog.text
        here.queue_window("gate", state("window"))
        assert here.writer.wait_idle(10)
        assert name_of(node.manifest("gate")[1]) == "window"


@pytest.mark.parametrize("end", ["cancel_window", "delete_stream", "queue_clear"])
def test_what_waited_is_not_written_after_its_end(end: str) -> None:
    node = Shared()
    node.free.clear()
    with keeper(stack(node)) as here:
        here.queue_window("gate", state("under way"))
        assert node.asked.wait(30)
        here.queue_window("gate", state("late"))
        threading.Timer(0.2, node.free.set).start()
        getattr(here, end)("gate")
        assert here.writer.wait_idle(30)
        found = node.manifest("gate")[1]
        assert name_of(found) == "under way" if end == "cancel_window" else found is None


def test_what_is_of_no_use_is_dropped_before_anything_new_is_written() -> None:
    node = Shared()
    place = torch.zeros(4, dtype=torch.int32)
    old = BlockKey("gate", 0, 0, 1)
    node.store([(old, Block(torch.ones(4, 8), torch.ones(4, 8), place, place))])
    node.put_manifest("gate", b"of another engine")
    with keeper(stack(node)) as here:
        assert here.find_window(GATE) is None
        here.queue_clear("gate")
        here.queue_window("gate", state("window"))
        assert here.writer.wait_idle(30)
        assert node.list_blocks("gate") == (Outcome.HIT, [])
        assert name_of(node.manifest("gate")[1]) == "window"


def test_a_deletion_that_waits_holds_back_its_own_stream_only() -> None:
    node = Shared()
    node.stuck = {"gate"}
    node.put_manifest("gate", b"of another engine")
    with keeper(stack(node)) as here:
        here.queue_clear("gate")
        for stream in ("gate", "yard"):
            here.queue_window(stream, state(stream))
        assert here.writer.wait_idle(10)
        assert name_of(node.manifest("yard")[1]) == "yard"
        assert here.read_manifest("gate") is None
        node.stuck = set()
        here.queue_window("gate", state("gate"))
        assert here.writer.wait_idle(10)
        assert name_of(here.read_manifest("gate")) == "gate"


def test_windows_of_other_kv_are_told_apart() -> None:
    plain = tier_fingerprint("model", {"tensor_parallel_size": 2, "quantization": None})
    assert plain == tier_fingerprint("model", {})
    marks = {plain, "model", tier_fingerprint("other", {}), tier_fingerprint("model", {"quantization": "fp8"})}
    assert len(marks) == 4
