"""The pool of slots against a dictionary; keys out of it as they came in."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.native import NativeEngine
from cluster.engine.native import engine as engine_module
from cluster.engine.window import kv as kv_module
from cluster.engine.window.kv import KVPool, StreamKV, gpu_pool_bytes, rotate, unrotate
from cluster.errors import CapacityError, ConfigError
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.models.loading import load_model, load_shape, load_truncated

SLOTS = 64


@pytest.fixture(scope="module")
def model():
    return load_model("tiny-qwen2_5_vl", seed=0)


def pool_of(model, slots: int = SLOTS) -> KVPool:
    pool = KVPool(model)
    return KVPool(model, slots * pool.slot_bytes)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), st.integers(0, 30), st.integers(0, 9)), max_size=30)
)
def test_what_streams_hold_stays_and_what_they_drop_comes_back(model, steps) -> None:
    pool = pool_of(model)
    streams = [StreamKV(pool) for _ in range(3)]
    held: list[list[int]] = [[], [], []]
    fresh = 0
    for number, leave, enter, extra in steps:
        kv, mine = streams[number], held[number]
        gone = round(leave * len(mine))
        kv.drop_slots(gone)
        del mine[:gone]
        before = [stream.slots.copy() for stream in streams]
        try:
            kv.resize(len(mine) + enter)
            new = list(range(fresh, fresh + enter))
            fresh += enter
            pool.k[:, kv.slots[len(mine) :]] = torch.tensor(new, dtype=pool.k.dtype)[None, :, None, None]
            mine += new
            kv.take_scratch(extra)
            kv.release_scratch()
        except CapacityError:
            assert sum(map(len, held)) + max(enter, extra) > SLOTS
            assert len(kv) in (len(before[number]), len(mine)), "nothing is taken in part"
        everything = np.concatenate([stream.slots for stream in streams])
        assert len(set(everything.tolist())) == len(everything) == sum(map(len, held)) == pool.used
        for stream, tokens in zip(streams, held, strict=True):
            assert stream.stored()[0][0, 0, :, 0].tolist() == tokens
            assert stream.nbytes == len(tokens) * pool.slot_bytes
    for stream in streams:
        stream.clear()
    assert pool.used == 0


def test_a_full_pool_says_so(model) -> None:
    with pytest.raises(ConfigError, match="a KV pool of 5 bytes holds no token"):
        KVPool(model, 5)
    kv = StreamKV(pool_of(model, 10))
    kv.resize(8)
    with pytest.raises(CapacityError, match="3 tokens do not fit the KV pool: 8 of its 10 slots of"):
        kv.resize(11)
    assert len(kv) == 8
    with pytest.raises(ValueError, match="9 slots cannot be dropped of 8"):
        kv.drop_slots(9)


def test_what_a_window_takes_and_gives_back_costs_the_same_beside_many_free_slots(model) -> None:
    pool = pool_of(model, 2**17)
    pool.free(pool.allocate(2**17))
    tracemalloc.start()
    try:
        pool.free(pool.allocate(100))
        assert tracemalloc.get_traced_memory()[1] < 2**17, "a byte for each of them"
    finally:
        tracemalloc.stop()


def test_a_container_s_limit_counts(model, monkeypatch, tmp_path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("cluster.hosts._MEMORY_LIMITS", (str(tmp_path / "nothing"), str(limit)))
    for text, slots in (("max\n", kv_module.MOST_SLOTS), ("1000000\n", 500_000 // pool_of(model).slot_bytes)):
        limit.write_text(text)
        assert KVPool(model).capacity == slots


def test_without_a_pool_only_numbers_are_kept() -> None:
    kv = StreamKV(None)
    kv.resize(7)
    kv.drop_slots(3)
    assert (len(kv), kv.nbytes) == (4, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_turned_back_to_what_they_were(dtype: torch.dtype) -> None:
    """After a day, and with a rotary that is scaled as some checkpoints scale theirs."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(2, 3, 50, 16, generator=generator)
    angle = (torch.rand(50, 8, dtype=torch.float64, generator=generator) * 172_800).repeat(1, 2)
    cos, sin = ((1.3 * f(angle)).float() for f in (torch.cos, torch.sin))
    stored = rotate(raw, cos, sin).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(unrotate(stored, cos, sin).float(), raw, rtol=tolerance, atol=tolerance)


def test_angles_are_exact_after_days(model) -> None:
    """Against Python's own numbers: in float32, the third day is wrong by a hundredth of a turn."""
    config = model.text_config
    size = config.hidden_size // config.num_attention_heads
    theta, sections = config.rope_parameters["rope_theta"], config.rope_parameters["mrope_section"]
    axis = [number for number, count in enumerate(sections) for _ in range(count)]
    positions = torch.tensor([[518_399, 7], [11, 400_001], [250_000, 3]])
    cos, sin = model.rotary(positions)
    for token in range(2):
        for i in range(size // 2):
            # The model's frequencies are float32.
            frequency = float(np.float32(1.0) / np.float32(theta) ** np.float32(2 * i / size))
            angle = int(positions[axis[i], token]) * float(model._text_model.rotary_emb.inv_freq[i])
            assert math.isclose(float(model._text_model.rotary_emb.inv_freq[i]), frequency, rel_tol=1e-5)
            for half in (i, i + size // 2):
                assert math.isclose(float(cos[token, half]), math.cos(angle), abs_tol=1e-6)
                assert math.isclose(float(sin[token, half]), math.sin(angle), abs_tol=1e-6)


def test_on_a_gpu_room_is_left_for_embeddings_and_a_pass() -> None:
    """Qwen2.5-VL-7B by hand: 28 layers of 4 key heads of 128, 3,584 wide, 18,944 in the MLP, two bytes a number."""
    shape = load_shape("qwen2_5_vl-7b")
    slot, embedding, activations = 2 * 28 * 4 * 128 * 2, 3584 * 2, 16384 * (3 * 18944 + 8 * 3584) * 2
    got = gpu_pool_bytes(shape, 64_000_000_000, slot, 16384)
    assert got == pytest.approx((0.9 * 64e9 - activations) * slot / (slot + embedding), rel=1e-9)
    assert gpu_pool_bytes(shape, 1_000_000_000, slot, 16384) == 0


@pytest.mark.parametrize("shape", ["qwen2_5_vl-7b", "internvl3-8b"])
def test_free_memory_is_measured_after_what_first_calls_take(shape, monkeypatch) -> None:
    """On a GPU; a CPU has its first calls when there is work."""
    measured: list[bool] = []

    def free(model) -> int:
        layers = "_decoder" in vars(model)
        measured.append(layers and encoded == [model.geometry.largest.tokens])
        return kv_module.host_memory_bytes()

    monkeypatch.setattr(engine_module, "free_bytes", free)
    with FakeCuda():
        model, encoded = load_truncated(shape, 2, DEVICE), []
        encode = model.encode
        monkeypatch.setattr(
            model, "encode", lambda frames: encoded.extend(len(f.cells) for f in frames) or encode(frames)
        )
        NativeEngine(model, kv_bytes=2**24)
    assert measured == [True]
    model, encoded = load_model("tiny-qwen2_5_vl"), []
    monkeypatch.setattr(model, "encode", lambda _: 1 / 0)
    NativeEngine(model)
    assert measured == [True, False]
