"""The connector in a real vLLM: windows slide on loaded KV exactly; what fails is computed, counted and not kept."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")

from connector_rig import BLOCK, QUESTIONS, Camera, Result, Rig
from prometheus_client import REGISTRY

from cluster.engine.vllm.connector.prompt_order import Order
from cluster.engine.vllm.connector.store import BlockFolder, BlockStore, KVShape
from cluster.engine.vllm.connector.tier_writer import BlockWriter
from cluster.engine.vllm.connector.transfer import FIELD, Transfer
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.tiers.arena import Arena
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel
from cluster.types import FrameSample

EXACT = {"rtol": 0.0, "atol": 3e-5}


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    torch.set_num_threads(1)
    return load_model("tiny-qwen2_5_vl")


@pytest.fixture(scope="module")
def rig(model: VisionLanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("rig")
    rig = Rig(model, folder / "config", folder / "blocks")
    try:
        rig.prime()
        yield rig
    finally:
        rig.close()


def camera_of(rig: Rig, stream: str, seed: int = 0) -> Camera:
    return Camera(rig, SyntheticCamera(stream, rig.model.geometry, kept=0.4, anchor_every=4, seed=seed))


def close(results: list[Result], expected: list[Tensor]) -> None:
    for result, each in zip(results, expected, strict=True):
        torch.testing.assert_close(result.logprobs, each, **EXACT)


def counted(name: str) -> float:
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm:sightline_reuse_{name}_total"
    )


def half(sample: FrameSample, tokens: int) -> np.ndarray:
    """Refresh every second token of every other frame, and nothing of the rest."""
    return (np.arange(tokens) % 2 == 0) & (sample.index % 2 == 0)


@pytest.mark.parametrize("refresh", [None, half], ids=["anchors", "parts of frames"])
def test_windows_slide_on_loaded_kv_exactly(rig: Rig, refresh: object) -> None:
    """Three questions in one step, on numbers of reused tokens that no block size divides."""
    camera = camera_of(rig, f"slides-{refresh}")
    loaded = []
    for first in range(0, 10, 2):
        order = camera.plan(first, first + 8, refresh)
        window = camera.ask(order, QUESTIONS)
        close(window.results, camera.expected(order, QUESTIONS))
        reports = [result.report for result in window.results]
        assert reports[0]["loaded"] == order.transfer.loaded == rig.system.tokens + order.reused
        # The others find the window in vLLM's own cache, but for its last, partial block.
        whole = len(order.slots) // BLOCK * BLOCK
        assert [result.cached for result in window.results[1:]] == [whole] * 2
        assert None not in [key and rig.folder.tokens(key) for key in order.keys if key]
        loaded.append(order.reused)
    assert all(loaded[1:])
    assert any(number % BLOCK for number in loaded)


def test_blocks_are_free_of_positions(rig: Rig) -> None:
    """What is kept is the model's raw key, wherever its token stood."""
    camera = camera_of(rig, "raw")
    for first in (0, 4):
        order = camera.plan(first, first + 8)
        camera.ask(order)
        camera.expected(order)
    size = rig.model.text_config.hidden_size // rig.model.text_config.num_attention_heads
    pairs = torch.arange(size // 2)
    columns = torch.cat((pairs, pairs + 16))  # heads of 16 are served in heads of 32
    for index in range(4, 12):
        block = store_of(rig).get(camera.keys[index])
        assert isinstance(block, Tensor)
        keys, values = camera.oracle.kv[index]
        torch.testing.assert_close(block[0][..., columns], keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(block[1][..., :size], values, rtol=0, atol=1e-4)


def store_of(rig: Rig, folder: BlockFolder | None = None) -> BlockStore:
    config = rig.model.text_config
    shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, 32, torch.float32)
    return BlockStore(folder or rig.folder, shape=shape, fingerprint="tests", cap_bytes=2**26)


def test_two_cameras_at_once(rig: Rig) -> None:
    cameras = [camera_of(rig, f"two-{number}", seed=number) for number in range(2)]
    for first in (0, 3, 6):
        orders = [camera.plan(first, first + 8) for camera in cameras]

        async def together(orders: list[Order] = orders) -> list:
            return await asyncio.gather(*[c.asking(o, QUESTIONS[:2]) for c, o in zip(cameras, orders, strict=True)])

        for camera, order, window in zip(cameras, orders, rig.run(together()), strict=True):
            close(window.results, camera.expected(order, QUESTIONS[:2]))
            assert window.results[0].report["loaded"] == order.transfer.loaded


@pytest.mark.parametrize("harm", ["damaged", "deleted", "cut"])
def test_what_cannot_be_loaded_is_asked_again_in_full(rig: Rig, harm: str) -> None:
    """All questions of that window fail and no others; computed in full, it is exact, and the next one reuses."""
    camera, other = camera_of(rig, f"harm-{harm}"), camera_of(rig, "unharmed", seed=1)
    for each in (camera, other):
        each.ask(each.plan(0, 8))
        each.expected(each.plan(0, 8, loads=False))
    orders = [each.plan(2, 10) for each in (camera, other)]
    path = rig.folder.path(orders[0].transfer.loads[2].key)
    data = bytearray(path.read_bytes())
    failed = counted("failed_loads")
    if harm == "damaged":
        data[-1] ^= 1
        # A file of its own, as a folder on another host would have it: what the worker has open it has checked.
        path.with_suffix(".new").write_bytes(data)
        path.with_suffix(".new").replace(path)
    elif harm == "cut":
        path.with_suffix(".new").write_bytes(data[:-1])
        path.with_suffix(".new").replace(path)
    else:
        path.unlink()

    async def together() -> list:
        asked = [each.asking(order, QUESTIONS[:2]) for each, order in zip((camera, other), orders, strict=True)]
        return await asyncio.gather(*asked)

    window, unharmed = rig.run(together())
    assert [result.failed for result in window.results] == [True, True]
    close(unharmed.results, other.expected(orders[1], QUESTIONS[:2]))
    assert not path.exists()
    assert not [key for key in orders[0].keys if key and orders[0].salt in key and rig.folder.tokens(key)]
    assert counted("failed_loads") > failed

    again = camera.plan(2, 10, loads=False)
    assert again.salt != orders[0].salt
    close(camera.ask(again, QUESTIONS[:2]).results, camera.expected(again, QUESTIONS[:2]))
    order = camera.plan(4, 12)
    assert order.reused > 0
    close(camera.ask(order).results, camera.expected(order))


def computed_alone(camera: Camera, order: Order) -> Result:
    """The same prompt as ``order`` with nothing loaded, under a salt of its own; changes nothing of the camera."""
    keys = dict(camera.keys)
    result = camera.ask(replace(order, transfer=Transfer((), (), order.positions), salt="alone")).results[0]
    camera.keys = keys
    return result


def test_vllms_own_cache_is_not_poisoned(rig: Rig) -> None:
    """The same tokens at the same positions, without the window's salt, are computed and not taken from the window."""
    camera = camera_of(rig, "salt")
    camera.ask(camera.plan(0, 8))
    order = camera.plan(2, 10)
    window = camera.ask(order)
    again = camera.ask(order).results[0]
    assert again.report["local"] > rig.system.tokens
    torch.testing.assert_close(again.logprobs, window.results[0].logprobs, **EXACT)
    alone = computed_alone(camera, order)
    assert alone.cached == 0
    assert (alone.logprobs - window.results[0].logprobs).abs().max() > 1e-3


def test_a_transfer_that_makes_no_sense_ends_its_request(rig: Rig) -> None:
    camera = camera_of(rig, "nonsense")
    order = camera.plan(0, 8)
    refused = counted("refused_requests")
    assert camera.ask(replace(order, transfer=Broken(order.transfer))).results[0].failed
    assert counted("refused_requests") == refused + 1
    close(camera.ask(order).results, camera.expected(order))


class Broken(Transfer):
    """A transfer that some other version of us would send."""

    def __init__(self, like: Transfer) -> None:
        super().__init__(like.loads, like.saves, like.positions)

    def to_params(self) -> dict:
        return {FIELD: {"version": 1, "loads": "?"}}


def test_a_window_outlives_the_engine_core_and_its_host(rig: Rig, model: VisionLanguageModel, tmp_path: Path) -> None:
    """The core is killed and its folder is gone; another one goes on from a tier.

    The other engine computes prompts in steps of 64 tokens, so that a window is loaded in one and kept in a later one.
    """
    tier = Arena(2**25, slab_bytes=2**16)
    camera = camera_of(rig, "moves")
    order = camera.plan(0, 8)
    camera.ask(order)
    camera.expected(order)
    options = {"shape": store_of(rig).shape, "fingerprint": "tests", "cap_bytes": 2**26}
    writer = BlockWriter(rig.folder, tier, **options)
    writer.keep("moves", [rig.system.block, *camera.keys.values()])
    assert writer.flush(30)
    writer.close()
    core = [each for each in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(each.cmdline())]
    for each in core:
        os.kill(each.pid, signal.SIGKILL)

    other = Rig(model, tmp_path / "config", tmp_path / "blocks", max_num_batched_tokens=64)
    try:
        writer = BlockWriter(other.folder, tier, **options)
        wanted = [(rig.system.block, rig.system.tokens)]
        wanted += [(key, len(camera.tokens[index])) for index, key in camera.keys.items()]
        assert len(writer.restore("moves", wanted, 30)) == len(wanted)
        writer.close()
        camera.rig = other
        for first in (2, 4):
            order = camera.plan(first, first + 8)
            window = camera.ask(order, QUESTIONS[:2])
            close(window.results, camera.expected(order, QUESTIONS[:2]))
            assert window.results[0].report["loaded"] == order.transfer.loaded
            assert order.reused > 0
    finally:
        other.close()
