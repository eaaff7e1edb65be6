"""Both sides of the connector without an engine: what is promised, loaded, kept, and told when something is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")

from cluster.engine.vllm.connector.paged import Rotary, RowPaged, block_slots
from cluster.engine.vllm.connector.scheduling import SchedulerSide, StepJobs, StepReport
from cluster.engine.vllm.connector.store import BlockFolder, BlockStore, KVShape
from cluster.engine.vllm.connector.transfer import FIELD, Load, Save, Transfer
from cluster.engine.vllm.connector.worker import WorkerSide
from cluster.engine.window.kv import rotate_wide

BLOCK, SIZE, LAYERS = 4, 16, ["one", "two"]
SHAPE = KVShape(layers=2, heads=2, size=SIZE, dtype=torch.float32)


def table() -> Tensor:
    angles = torch.arange(64)[:, None] * 100.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


ROTARY = Rotary(table())


@dataclass
class Request:
    """What a scheduler's request shows the connector."""

    transfer: Transfer | None
    num_tokens: int = 20
    request_id: str = "r"
    cache_salt: str | None = "window"
    params: dict[str, Any] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        return self.params if self.transfer is None else self.transfer.to_params()


@dataclass
class Core:
    """A scheduler and a worker, and steps in which "the model" writes raw keys ``self.raw`` where it computes."""

    folder: BlockFolder
    raw: Tensor = field(
        default_factory=lambda: torch.randn(2, 2, 20, 2, SIZE, generator=torch.Generator().manual_seed(1))
    )

    def __post_init__(self) -> None:
        self.scheduler = SchedulerSide()
        store = BlockStore(self.folder, shape=SHAPE, fingerprint="m", cap_bytes=2**20)
        self.worker = WorkerSide(store, LAYERS, block=BLOCK, rotary=lambda: ROTARY)
        self.caches = {name: torch.zeros(8, 2, BLOCK, 2 * SIZE) for name in LAYERS}
        self.worker.register_caches(self.caches, RowPaged())

    def step(self, request: Request, blocks: list[int], local: int = 0, *, meanwhile: Any = None) -> StepJobs:
        """One step that finishes the prompt; ``meanwhile``: what happens between its promise and its load."""
        external = self.scheduler.match_request(request, local)
        self.scheduler.on_allocated(request, blocks, external)
        jobs = self.scheduler.make_jobs({request.request_id: request.num_tokens}, lambda _: blocks)
        if meanwhile is not None:
            meanwhile()
        self.run(jobs, request, blocks, local + external)
        return jobs

    def run(self, jobs: StepJobs, request: Request, blocks: list[int], start: int) -> None:
        self.worker.begin_step(jobs)
        slots = block_slots(torch.tensor(blocks), start, request.num_tokens, BLOCK)
        positions = np.arange(request.num_tokens)[None] if request.transfer is None else request.transfer.positions
        at = ROTARY.at(torch.from_numpy(np.ascontiguousarray(positions[:, start : request.num_tokens])))
        for number, name in enumerate(LAYERS):
            keys = self.raw[0, number, start : request.num_tokens]
            values = self.raw[1, number, start : request.num_tokens]
            RowPaged().write(self.caches[name], slots, rotate_wide(keys, *at), values)
            self.worker.load_layer(name)
            self.worker.save_layer(name)
        self.worker.end_step()

    def tell(self) -> StepReport | None:
        report = self.worker.pop_report()
        if report is not None:
            self.scheduler.apply_report(report)
        return report

    def read(self, blocks: list[int], count: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        slots = block_slots(torch.tensor(blocks), 0, count, BLOCK)
        return RowPaged().read(self.caches[LAYERS[layer]], slots)


def first(positions: np.ndarray | None = None) -> Request:
    """Computes 20 tokens and keeps a block of the first 3, one of the next 6."""
    positions = np.arange(20)[None] if positions is None else positions
    return Request(Transfer((), (Save("a", 3, 0), Save("b", 6, 3)), positions))


def second(loads: tuple[Load, ...], saves: tuple[Save, ...] = (), **options: Any) -> Request:
    options = {"request_id": "s", "cache_salt": "next", **options}
    return Request(Transfer(loads, saves, np.arange(30, 50)[None]), **options)


@pytest.fixture
def core(tmp_path: Path) -> Core:
    core = Core(BlockFolder(tmp_path))
    core.step(first(), [5, 2, 7, 0, 3])
    assert core.tell() == StepReport(saved={"r": 2})
    return core


def test_kept_blocks_are_loaded_at_other_positions_and_places(core: Core) -> None:
    request = second((Load("b", 6), Load("a", 3, (0, 2))))
    assert core.scheduler.match_request(request, 0) == 8
    blocks = [1, 6, 4, 0, 3]
    core.step(request, blocks)
    assert core.tell() is None
    for layer in range(2):
        keys, values = core.read(blocks, 8, layer)
        raw = torch.cat((core.raw[:, layer, 3:9], core.raw[:, layer, 0:3:2]), dim=1)
        torch.testing.assert_close(keys, rotate_wide(raw[0], *ROTARY.at(torch.arange(30, 38)[None])))
        assert torch.equal(values, raw[1])
    done = core.scheduler.on_finished(request)
    assert done == {FIELD: {"listed": 8, "loaded": 8, "local": 0}}
    assert core.scheduler.pop_counts() == {"loads": 1, "loaded_tokens": 8, "saved_blocks": 2}


def test_what_vllm_has_itself_is_not_loaded(core: Core) -> None:
    request = second((Load("b", 6), Load("a", 3)))
    blocks = [1, 6, 4, 0, 3]
    core.step(request, blocks, local=4)
    keys, _ = core.read(blocks, 9)
    assert not keys[:4].any()
    raw = torch.cat((core.raw[0, 0, 3:9], core.raw[0, 0, 0:3]))[4:]
    torch.testing.assert_close(keys[4:], rotate_wide(raw, *ROTARY.at(torch.arange(34, 39)[None])))


def test_at_least_one_token_is_computed(core: Core) -> None:
    assert core.scheduler.match_request(second((Load("a", 3), Load("b", 6)), num_tokens=9), 0) == 8


@pytest.mark.parametrize("at", [0, 1])
def test_a_block_that_is_not_there_fails_its_request_alone(core: Core, at: int) -> None:
    """Whether it went before the promise or after it, and wherever it stands: nothing is loaded and nothing kept."""
    loads = [Load("b", 6), Load("a", 3)]
    loads.insert(at, Load("gone", 2))
    request, other = second(tuple(loads), (Save("c", 2, 11),)), second((Load("a", 3),), request_id="t")
    blocks, others = [1, 6, 4, 0, 3], [5, 2, 7, 0, 3]
    for each, ids in ((request, blocks), (other, others)):
        core.scheduler.on_allocated(each, ids, core.scheduler.match_request(each, 0))
    jobs = core.scheduler.make_jobs({"s": 20, "t": 20}, lambda name: blocks if name == "s" else others)
    core.run(jobs, other, others, 3)
    # Tokens 0 to 10 lie in the first three paged blocks; the prompt's others were to be computed anyway.
    assert core.worker.pop_errors() == {1, 6, 4}
    assert core.worker.pop_errors() == set()
    report = core.tell()
    assert report == StepReport(failed={"s": "block gone is missing"}, lost={"s": 1})
    assert core.folder.tokens("c") is None
    keys, _ = core.read(others, 3)
    torch.testing.assert_close(keys, rotate_wide(core.raw[0, 0, :3], *ROTARY.at(torch.arange(30, 33)[None])))
    assert core.scheduler.pop_counts()["failed_loads"] == 1


def test_a_block_of_another_length_is_an_error(core: Core) -> None:
    other = BlockStore(core.folder, shape=SHAPE, fingerprint="m", cap_bytes=2**20)
    other.put([("a", torch.zeros(SHAPE.block(2)))])
    core.step(second((Load("a", 3),)), [1, 6, 4, 0, 3])
    assert core.worker.pop_errors() == {1}
    assert core.tell() == StepReport(failed={"s": "block a has 2 tokens and not 3"})


def test_positions_without_rotary_fail_the_load_and_not_the_core(core: Core) -> None:
    request = Request(Transfer((Load("a", 3),), (Save("c", 2, 3),), np.full((1, 20), 64)), request_id="s")
    core.scheduler.on_allocated(request, [1], core.scheduler.match_request(request, 0))
    core.worker.begin_step(core.scheduler.make_jobs({"s": 20}, lambda _: [1, 6, 4, 0, 3]))
    core.worker.end_step()
    report = core.worker.pop_report()
    assert report is not None
    assert "0 to 63" in report.failed["s"]
    assert report.lost == {"s": 1}


def test_a_part_of_a_frame_is_refreshed(core: Core) -> None:
    request = second((Load("b", 6, (0, 2, 3, 4, 5)),), (Save("b2", 6, 5, (1,), "b"),))
    core.raw = core.raw + 1
    core.step(request, [1, 6, 4, 0, 3])
    expected = (core.raw - 1)[:, :, 3:9].clone()
    expected[:, :, 1] = core.raw[:, :, 5]
    found = core.worker.store.get("b2")
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, expected)


def test_a_part_without_its_base_is_not_kept(core: Core) -> None:
    request = second((Load("a", 3),), (Save("b2", 6, 5, (1,), "gone"), Save("c", 2, 6)))
    core.step(request, [1, 6, 4, 0, 3])
    report = core.tell()
    assert report is not None
    assert (report.saved, report.lost) == ({"s": 1}, {"s": 1})
    assert core.folder.tokens("b2") is None


def test_blocks_are_kept_once_all_of_them_is_computed(tmp_path: Path) -> None:
    """A prompt that is computed in several steps."""
    core, request = Core(BlockFolder(tmp_path)), first()
    core.scheduler.on_allocated(request, [5, 2, 7, 0, 3], core.scheduler.match_request(request, 0))
    assert not core.scheduler.make_jobs({"r": 8}, lambda _: []).saves
    assert core.scheduler.make_jobs({"r": 9}, lambda _: [5, 2, 7, 0, 3]).saves
    assert not core.scheduler.make_jobs({"r": 20}, lambda _: []).saves


def test_a_pass_that_ended_early_keeps_nothing(tmp_path: Path) -> None:
    core, request = Core(BlockFolder(tmp_path)), first()
    core.scheduler.on_allocated(request, [5, 2, 7, 0, 3], core.scheduler.match_request(request, 0))
    core.worker.begin_step(core.scheduler.make_jobs({"r": 20}, lambda _: [5, 2, 7, 0, 3]))
    core.worker.save_layer("one")
    core.worker.end_step()
    assert core.tell() == StepReport(saved={"r": 0}, lost={"r": 2})
    assert core.folder.tokens("a") is None


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request(None, params={FIELD: {"version": 1}}), "cannot be read"),
        (Request(Transfer((Load("a", 3),), (), np.arange(20)[None]), cache_salt=None), "cache_salt"),
        (Request(Transfer((), (Save("a", 30, 0),), np.arange(30)[None])), "of a prompt of 20"),
    ],
)
def test_what_makes_no_sense_ends_its_request(tmp_path: Path, request_: Request, sentence: str) -> None:
    core = Core(BlockFolder(tmp_path))
    assert core.scheduler.match_request(request_, 4) == 15
    core.scheduler.on_allocated(request_, [5, 2, 7, 0, 3], 15)
    core.worker.begin_step(core.scheduler.make_jobs({"r": 20}, lambda _: [5, 2, 7, 0, 3]))
    core.worker.end_step()
    assert core.worker.pop_errors() == {2, 7, 0, 3}
    report = core.tell()
    assert report is not None
    assert sentence in report.failed["r"]
    assert core.scheduler.on_finished(request_) is None
    assert core.scheduler.pop_counts() == {"refused_requests": 1, "failed_loads": 1}


def test_requests_of_others_are_left_alone(tmp_path: Path) -> None:
    core, request = Core(BlockFolder(tmp_path)), Request(None)
    core.step(request, [5, 2, 7, 0, 3])
    assert core.scheduler.on_finished(request) is None


def test_reports_of_workers_agree_on_the_worst() -> None:
    one = StepReport(failed={"a": "x"}, saved={"b": 2, "c": 1}, lost={"d": 1})
    two = StepReport(failed={"e": "y"}, saved={"b": 1}, lost={"c": 1})
    assert one.aggregate(two) == StepReport({"e": "y", "a": "x"}, {"b": 1, "c": 0}, {"d": 1, "c": 1})


def test_why_vllm_cannot_compute_what_a_load_promised() -> None:
    """Its workers get items under a loaded prefix without content, before anybody knows whether the load works."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.multimodal.utils import strip_covered_mm_data

    from cluster.engine.vllm.prompt_items import MODALITY, WindowItem, item_kwargs

    item = WindowItem.of(torch.zeros(4, 8), torch.zeros(3, 4, dtype=torch.int64), "content", after=4)
    place = PlaceholderRange(offset=2, length=4)
    feature = MultiModalFeatureSpec(data=item_kwargs(item), modality=MODALITY, identifier="i", mm_position=place)
    (sent,) = strip_covered_mm_data([feature], num_computed_tokens=6, uses_mrope=True)
    assert sent.data is not None
    assert "embeds" not in sent.data
    assert "positions" in sent.data
