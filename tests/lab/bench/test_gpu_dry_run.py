"""The engine on a fake GPU: what the fake one refuses and counts, and that production runs on it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

from cluster.engine.native.kernels.slots import TILES
from cluster.errors import ConfigError
from cluster.lab.bench import gpu, gpu_host
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.lab.bench.gpu_host import camera_samples, host_cost
from cluster.lab.bench.gpu_roofline import (
    CARDS,
    PREFILL_MFU,
    TOWER_MFU,
    WindowLoad,
    _row,
    predicted_streams,
)
from cluster.models.loading import load_shape
from cluster.models.presets import SHAPES

INDICES = [
    0,
    (slice(None), 1),
    (..., slice(0, 2)),
    (slice(None), slice(1, 3), None),
    (None, ..., -1),
    torch.tensor([1, 0, 1]),
    (slice(None), torch.tensor([2, 0])),
    (0, slice(None), torch.tensor([[1], [3]])),
    slice(2, 1),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_gives_the_shapes_of_a_real_device(index):
    real = torch.zeros(2, 3, 4)
    with FakeCuda():
        fake = torch.zeros(2, 3, 4, device=DEVICE)
        assert fake[index].shape == real[index].shape
        assert fake[index].device == DEVICE
        fake[index] = 1.0


def test_two_devices_do_not_mix():
    with FakeCuda():
        there = torch.zeros(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        assert (there + torch.ones(3).to(DEVICE)).device == DEVICE


def test_what_the_host_computes_is_real():
    with FakeCuda():
        assert torch.arange(4).cumsum(0).tolist() == [0, 1, 3, 6]
        assert torch.unique(torch.tensor([2, 1, 2])).tolist() == [1, 2]


def test_launches_are_counted_and_views_are_free():
    with FakeCuda() as cuda:
        there = torch.zeros(2, 6, device=DEVICE)
        cuda.reset()
        there.view(3, 4)[1:].transpose(0, 1)
        assert sum(cuda.launches.values()) == 0
        (there * 2) @ there.T
        assert cuda.launches == {"aten.mul": 1, "aten.mm": 1}


@pytest.mark.parametrize(
    "read",
    [
        lambda there: there.tolist(),
        lambda there: there.cpu(),
        lambda there: there.to("cpu"),
        lambda there: there[0].item(),
        lambda there: bool(there[0] > 0),
        lambda there: there[there > 0],
    ],
)
def test_a_read_by_the_host_is_counted(read):
    with FakeCuda() as cuda:
        there = torch.zeros(4, device=DEVICE)
        cuda.reset()
        # How many of a mask's there are is in the data, which is not there.
        with contextlib.suppress(RuntimeError):
            read(there)
        assert cuda.syncs == 1


def test_every_read_of_one_line_is_counted():
    with FakeCuda() as cuda:
        there = torch.zeros(4, device=DEVICE)
        cuda.reset()
        [each.item() for each in there]
        there.tolist()
        assert cuda.syncs == 4 + 1


@pytest.mark.parametrize(
    ("captured", "says"),
    [
        (lambda there, _: there.tolist(), "host reads"),
        (lambda there, _: there[there > 0], "host reads"),
        (lambda there, here: there.copy_(here), "host data is passed"),
        (lambda _, here: here.to(DEVICE), "host data is passed"),
    ],
)
def test_a_capture_refuses_what_a_gpu_s_refuses(captured, says):
    with FakeCuda() as cuda:
        there, here = torch.zeros(4, device=DEVICE), torch.ones(4)
        with pytest.raises(RuntimeError, match=says):
            cuda.capture(lambda: captured(there, here))
        cuda.reset()
        replay = cuda.capture(lambda: there.mul_(2).add_(torch.tensor(1.0)))
        replay()
        assert cuda.launches["aten.mul_"] == 2
        assert there.tolist() is not None, "reads are allowed again"


def test_written_keys_are_counted_by_slots():
    with FakeCuda() as cuda:
        keys = torch.zeros(4, 10, 8, device=DEVICE)
        cuda.watch = (4, 8)
        cuda.reset()
        keys.index_select(1, torch.tensor([1, 2, 3]).to(DEVICE))
        keys[:, :5].contiguous()
        assert cuda.written == 3 + 5
        pool = torch.zeros(2, 50, 4, 8, device=DEVICE)
        cuda.reset()
        slots = torch.tensor([1, 2, 3]).to(DEVICE)
        pool.index_select(1, slots).transpose(1, 2).contiguous()
        assert cuda.written == 2 * 3 + 2 * 3, "both layouts, of all layers"
        cuda.reset()
        pool[0].index_copy_(0, slots, pool[1, :3])
        pool.index_copy_(1, slots, pool[:, :3])
        assert cuda.written == 3 + 2 * 3, "what is written, not what there is"


def test_threads_that_start_inside_have_the_device_too():
    seen = []
    with FakeCuda():
        there = torch.zeros(2, device=DEVICE)
        thread = threading.Thread(target=lambda: seen.append((there + there).device))
        thread.start()
        thread.join()
    assert seen == [DEVICE]
    assert threading.Thread.run.__qualname__ == "Thread.run"


def test_a_kernel_of_one_thread_does_not_change_what_another_sees():
    seen = []
    with FakeCuda() as cuda:
        there = torch.zeros(2, device=DEVICE)

        def kernel():
            with in_kernel_invocation_manager(cuda._fake):
                thread = threading.Thread(target=lambda: seen.append((there.device, there.cpu().tolist())))
                thread.start()
                thread.join()
                seen.append(there.device)

        kernel()
    assert seen[0][0] == DEVICE
    assert len(seen[0][1]) == 2
    assert seen[1] == torch.device("meta")


def test_a_fault_that_a_thread_logs_is_a_fault():
    def writer(_shape, _layers):
        try:
            raise NotImplementedError("no data")
        except NotImplementedError:
            logging.getLogger("cluster.memory.writer").exception("could not be written")

    assert gpu._tried("", 2, "memory", writer)["fault"] == "NotImplementedError: no data"
    assert gpu._tried("", 2, "memory", lambda _shape, _layers: None)["fault"] == ""


@pytest.fixture
def short_windows(monkeypatch):
    """A few seconds, of models with few words and few layers in their towers: every launch is one of Python's."""
    for module in (gpu, gpu_host):
        monkeypatch.setattr(module, "WINDOW_S", 16.0)
        monkeypatch.setattr(module, "STRIDE_S", 4.0)
    towers = {
        "qwen2_5_vl-7b": {"depth": 2, "fullatt_block_indexes": [1]},
        "internvl3-8b": {"num_hidden_layers": 2},
        "qwen3_vl-8b": {"depth": 2, "deepstack_visual_indexes": [0, 1]},
    }
    for name, tower in towers.items():
        shape = SHAPES[name]
        assert tower.keys() <= shape.vision.keys()
        few = replace(shape, text={**shape.text, "vocab_size": 512}, vision={**shape.vision, **tower})
        monkeypatch.setitem(SHAPES, name, few)
    camera_samples.cache_clear()
    yield
    camera_samples.cache_clear()


@pytest.mark.parametrize(
    ("shape", "scenario"),
    [
        ("qwen2_5_vl-7b", "refresh anchors"),
        ("qwen2_5_vl-7b", "refresh first_percent"),
        ("internvl3-8b", "explain"),
        ("internvl3-8b", "explain, captured"),
        ("qwen2_5_vl-7b", "explain, captured"),
        ("internvl3-8b", "ask"),
        ("qwen2_5_vl-7b", "frames read the past"),
        ("qwen2_5_vl-7b", "memory"),
        ("qwen2_5_vl-7b", "hand over"),
        ("internvl3-8b", "idle windows"),
        ("qwen3_vl-8b", "gate"),
    ],
)
def test_production_runs_on_a_gpu(shape, scenario, short_windows):
    with FakeCuda():
        gpu.SCENARIOS[scenario](shape, 2)


@pytest.mark.parametrize("shape", [*gpu.SHAPES, "qwen3_vl-8b"])
def test_the_tower_launches_as_much_for_many_frames_as_for_one(shape):
    with FakeCuda() as cuda:
        rig = gpu.Rig.of(shape, 2)
        # The first call joins the projections of each layer.
        gpu._tower(rig, cuda, 1)
        assert gpu._tower(rig, cuda, 8) == gpu._tower(rig, cuda, 1)


def test_the_front_end_is_compared_over_the_made_clips(monkeypatch):
    """Without a model: what is left of the dry run is the decoder's part. Whole clips are compared in its own tests."""
    monkeypatch.setattr("cluster.lab.bench.gpu_frontend.CLIP_S", 3.0)
    result = gpu.run(argparse.Namespace(dry_run=True, shape=[], layers=2, clip=None))
    assert result.figures["gpu_frontend_equal"] >= 0.999
    assert [note.split(":")[0] for note in result.notes[1:]] == [
        f"gpu_frontend {clip}" for clip in ("street", "noisy", "hevc", "night")
    ]


def test_a_clip_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.mp4 does not exist"):
        gpu.run(argparse.Namespace(dry_run=True, shape=[], layers=2, clip=[tmp_path / "nowhere.mp4"]))


def test_the_host_s_part_of_a_step_is_measured_without_arithmetic():
    """In a process of its own: what torch does elsewhere with shapes is left alone."""
    cost = host_cost("tiny-qwen2_5_vl", 2)
    assert 0 < cost.step < 1000
    assert 0 < cost.end < cost.end + cost.ahead < 1000
    assert torch.ones(2, device="meta").abs().shape == (2,)


@pytest.fixture(scope="module")
def load():
    return WindowLoad(
        "clip",
        computed=1500,
        attended=3e6,
        omitted=(1400, 2.8e6),
        slots=2600,
        patches=2000,
        patch_bytes=4e6,
        tower_flops=3e12,
    )


def test_the_roofline_is_the_least_of_time_memory_and_link(load):
    model = load_shape("qwen2_5_vl-7b")
    h100 = next(card for card in CARDS if card.name == "H100 SXM")
    row = _row(model, h100, load, "bf16")
    assert row["streams"] == min(row["by_time"], row["by_windows"], row["by_memories"], row["by_pcie"])
    products = 2 * 1500 * 6.525e9 + 4 * 28 * 28 * 128 * 3e6
    # The last layer's output projection, MLP and attention.
    products -= 2 * 1400 * (3584 * 3584 + 3 * 3584 * 18944) + 4 * 28 * 128 * 2.8e6
    assert row["prefill_ms"] == pytest.approx(1e3 * products / 989e12 / PREFILL_MFU, rel=0.001)
    assert row["tower_ms"] == pytest.approx(1e3 * 3e12 / 989e12 / TOWER_MFU)
    # An eighth of what 16.6 GB of weights leave for frames that wait for memories, 22 MiB each (an eighth of 6,144
    # tokens of 30,016 bytes); nine tenths of the rest, less a pass's activations; 57,344 bytes a slot beside 7,168 of
    # its embedding.
    assert row["by_memories"] == pytest.approx((80e9 - 16.6e9) / 8 / (22 * 2**20), rel=0.01)
    pool = 0.9 * 7 / 8 * (80e9 - 16.6e9) - 16384 * (3 * 18944 + 8 * 3584) * 2
    assert row["by_windows"] == pytest.approx(pool / (57344 + 7168) / 2600, rel=0.01)
    slow = replace(h100, bandwidth=h100.bandwidth / 100)
    assert _row(model, slow, load, "bf16")["prefill_ms"] > 2 * row["prefill_ms"], "bytes, not products"
    fp8 = _row(model, h100, load, "fp8")
    assert row["by_time"] < fp8["by_time"] < 2 * row["by_time"], "attention stays in bf16"
    assert fp8["by_windows"] > row["by_windows"]
    assert predicted_streams([row, fp8], "H100 SXM", "fp8") == fp8["streams"]


def test_the_roofline_s_keys_have_the_size_that_the_model_states(load, monkeypatch):
    """As Qwen3-VL's smaller ones, whose heads are wider than the model over their number."""
    model = load_shape("qwen2_5_vl-7b")
    monkeypatch.setattr(model.text_config, "head_dim", 192, raising=False)
    blocks = 1e6
    few, many = (
        _row(model, CARDS[0], replace(load, attended=slots), "bf16")["gbytes"] for slots in (0, TILES[-1] * blocks)
    )
    # Keys and values of two bytes, 28 layers, 4 key heads; each block of rows reads a slot once.
    assert many - few == pytest.approx(2 * 2 * 28 * 4 * 192 * blocks / 1e9)
