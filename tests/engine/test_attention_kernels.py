"""Every kernel against attention written as a loop over rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.engine.native.kernels import blocks as blocks_module
from cluster.engine.native.kernels import choose_kernel
from cluster.engine.native.kernels import slots as slots_module
from cluster.engine.native.kernels.blocks import CPUFlashKernel, SDPAKernel, make_blocks
from cluster.engine.native.kernels.slots import SlotsKernel
from cluster.engine.window.kv import rotate
from cluster.engine.window.planner import Run, causal_runs, question_runs, question_tails
from cluster.errors import ConfigError
from cluster.registry import kernels

HEADS, KV_HEADS, SIZE = 4, 2, 8
SCALE = 0.3


def by_hand(streams: list[list[Run]], query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    out = torch.full((query.shape[1], HEADS, SIZE), math.nan)
    for runs, k, v in zip(streams, keys, values, strict=True):
        for run in runs:
            for i in range(run.count):
                seen = [*range(run.prefix), *range(run.tail, run.stop - (run.count - 1 - i))]
                for head in range(HEADS):
                    shared = head // (HEADS // KV_HEADS)
                    weights = torch.softmax(k[shared, seen] @ query[head, run.row + i] * SCALE, dim=0)
                    out[run.row + i, head] = weights @ v[shared, seen]
    return out


def window(mask: np.ndarray, system: int, questions: list[tuple[int, int]], row: int) -> tuple[list[Run], int]:
    """Runs of one stream from ``row`` on, and its slots."""
    runs = [run.moved(row) for run in causal_runs(np.flatnonzero(mask) + system)]
    tails = question_tails(system + len(mask), [t for t, _ in questions], [r for _, r in questions])
    rows = sum(run.count for run in runs)
    runs += [run.moved(row + rows) for run in question_runs(system + len(mask), tails)]
    return runs, tails[-1].stop


def laid_out(windows: list) -> tuple[list[list[Run]], list[int], int]:
    """Runs and slots of each stream, and all rows."""
    runs, sizes, rows = [], [], 0
    for mask, system, questions in windows:
        stream, slots = window(mask, system, questions, rows)
        runs.append(stream)
        sizes.append(slots)
        rows += sum(run.count for run in stream)
    return runs, sizes, rows


KERNELS = {
    "cpu_flash": lambda: CPUFlashKernel(),
    "cpu_flash, no joining": lambda: CPUFlashKernel(call_cost=0),
    "cpu_flash, some joining": lambda: CPUFlashKernel(call_cost=20),
    "sdpa": lambda: SDPAKernel(),
    "sdpa, no joining": lambda: SDPAKernel(call_cost=0),
    "slots": lambda: SlotsKernel(),
}

streams = st.lists(
    st.tuples(
        st.lists(st.booleans(), max_size=40).map(lambda flags: np.array(flags, dtype=bool)),
        st.integers(0, 6),
        st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=25, deadline=None)
@given(windows=streams, seed=st.integers(0, 9))
def test_kernels_equal_attention_by_hand(name: str, windows: list, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    runs, sizes, rows = laid_out(windows)
    query = torch.randn(HEADS, rows, SIZE, generator=generator)
    key, value, tables = pool_of(sizes, generator)
    kernel = KERNELS[name]()
    got = kernel.attend(kernel.prepare(tables, runs, query), query, key, value, SCALE)
    torch.testing.assert_close(got, by_hand(runs, query, *held(tables, key, value)), rtol=1e-4, atol=1e-5)


def pool_of(sizes: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    """A layer of a pool, of which each stream has some slots, in no order."""
    places = torch.randperm(sum(sizes) + 7, generator=generator).numpy()
    key, value = torch.randn(2, len(places), KV_HEADS, SIZE, generator=generator)
    return key, value, np.split(places[: sum(sizes)], np.cumsum(sizes)[:-1])


def held(tables: list[np.ndarray], *parts: Tensor) -> list[list[Tensor]]:
    return [[part[torch.from_numpy(table)].transpose(0, 1) for table in tables] for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_s_kernel_at_a_model_s_width(dtype: torch.dtype) -> None:
    """Heads of 128, seven of which share a key head; 100 rows scattered over 300 slots, and a question of 70."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(300, generator=generator).numpy() < 0.33
    runs, slots = window(mask, 5, [(70, 0)], 0)
    rows = sum(run.count for run in runs)
    query, key, value = (
        torch.randn(*shape, 128, generator=generator).to(dtype) for shape in ((7, rows), (slots, 1), (slots, 1))
    )
    kernel = SlotsKernel()
    table = torch.randperm(slots, generator=generator).numpy()
    got = kernel.attend(kernel.prepare([table], [runs], query), query, key, value, 128**-0.5)
    assert got.dtype == dtype
    k, v = (part[torch.from_numpy(table), 0].double() for part in (key, value))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for run in runs:
        for i in range(run.count):
            seen = [*range(run.prefix), *range(run.tail, run.stop - (run.count - 1 - i))]
            weights = torch.softmax(query[:, run.row + i].double() @ k[seen].T * 128**-0.5, dim=-1)
            torch.testing.assert_close(got[run.row + i].double(), weights @ v[seen], rtol=tolerance, atol=tolerance)


@given(windows=streams)
def test_tables_are_aligned_whatever_their_sizes(windows: list) -> None:
    """Triton compiles a kernel anew for addresses that are no multiples of 16 bytes."""
    runs, sizes, rows = laid_out(windows)
    prepared = SlotsKernel().prepare([np.arange(size) for size in sizes], runs, torch.empty(0))
    for part in (prepared.table, prepared.blocks, prepared.rows):
        assert part.data_ptr() % 16 == 0
        assert part.is_contiguous()
    assert prepared.table.tolist() == [slot for size in sizes for slot in range(size)]
    assert len(prepared.rows) == rows


@pytest.mark.parametrize(("dtype", "tiles"), [(torch.float32, [16, 64]), (torch.bfloat16, [16, 64, 128])])
def test_the_gpu_s_kernel_is_warmed_up_for_each_tile(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tiles: list[int]
) -> None:
    """With blocks that have no rows."""
    ran: list[int] = []
    attend = slots_module._attend

    def recorded(*given: object) -> Tensor:
        ran.append(given[6])
        assert not given[4].any()
        return attend(*given)

    monkeypatch.setattr(slots_module, "_attend", recorded)
    SlotsKernel().warm_up(HEADS, torch.randn(5, KV_HEADS, 16).to(dtype))
    assert ran == tiles


def test_long_runs_are_cut_to_bounded_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "ROWS", 7)
    runs = [[Run(0, 24, prefix=3, tail=3, stop=27)]]
    query, key = torch.randn(HEADS, 24, SIZE), torch.randn(27, KV_HEADS, SIZE)
    kernel = SDPAKernel(call_cost=0)
    prepared = kernel.prepare([np.arange(27)], runs, query)
    [(_, blocks)] = prepared
    assert max(block.rows for block in blocks) == 7
    got = kernel.attend(prepared, query, key, key, SCALE)
    keys = [key.transpose(0, 1)]
    torch.testing.assert_close(got, by_hand(runs, query, keys, keys), rtol=1e-4, atol=1e-5)


def test_scattered_tokens_are_joined_and_long_runs_are_not() -> None:
    scattered = causal_runs(np.arange(30, 2300, 9))
    blocks = make_blocks(scattered)
    assert 5 <= len(blocks) <= 20
    assert sum(block.rows for block in blocks) == len(scattered)
    apart = causal_runs(np.concatenate([np.arange(0, 256), np.arange(600, 856)]))
    assert [block.visible for block in make_blocks(apart)] == [None, None]


def test_rotation_is_the_library_s() -> None:
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    x, angle = torch.randn(KV_HEADS, 11, SIZE), torch.randn(11, SIZE // 2)
    cos, sin = torch.cat([angle.cos()] * 2, dim=1), torch.cat([angle.sin()] * 2, dim=1)
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos[None], sin[None])
    torch.testing.assert_close(rotate(x, cos, sin), expected[0], rtol=0, atol=1e-6)


def test_the_kernel_fits_device_and_dtype() -> None:
    cpu = torch.device("cpu")
    assert isinstance(choose_kernel(cpu, torch.float32), CPUFlashKernel)
    assert isinstance(choose_kernel(cpu, torch.bfloat16), CPUFlashKernel)
    assert isinstance(choose_kernel(cpu, torch.float16), SDPAKernel)
    for dtype in (torch.bfloat16, torch.float32):
        assert isinstance(choose_kernel(torch.device("cuda"), dtype), SlotsKernel)
    assert isinstance(choose_kernel(cpu, torch.float32, "sdpa"), SDPAKernel)
    with pytest.raises(ConfigError, match=r"did you mean 'sdpa'"):
        choose_kernel(cpu, torch.float32, "sdp")
    assert kernels.names() == ["cpu_flash", "sdpa", "slots"]
