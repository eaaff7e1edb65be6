"""Every kernel against attention written as a loop over rows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.native.attention import rotate
from cluster.engine.native.kernels import choose_kernel
from cluster.engine.native.kernels import sdpa as sdpa_module
from cluster.engine.native.kernels.blocks import make_blocks
from cluster.engine.native.kernels.cpu_flash import CPUFlashKernel
from cluster.engine.native.kernels.sdpa import SDPAKernel
from cluster.engine.native.kernels.varlen import VarlenKernel, make_packs
from cluster.engine.window.planner import Run, causal_runs, question_runs, question_tails
from cluster.errors import ConfigError
from cluster.registry import kernels

HEADS, KV_HEADS, SIZE = 4, 2, 8
SCALE = 0.3


def reference_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What ``torch.nn.attention.varlen.varlen_attn`` documents, sequence by sequence."""
    assert window_size == (-1, 0)
    assert enable_gqa
    out = torch.empty_like(query)
    lengths_q, lengths_k = cu_seq_q.diff(), cu_seq_k.diff()
    assert (max_q, max_k) == (int(lengths_q.max()), int(lengths_k.max()))
    for i, (n, m) in enumerate(zip(lengths_q.tolist(), lengths_k.tolist(), strict=True)):
        rows = slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1]))
        seen = slice(int(cu_seq_k[i]), int(cu_seq_k[i + 1]))
        mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        q, k, v = (t.transpose(0, 1)[None] for t in (query[rows], key[seen], value[seen]))
        out[rows] = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(
            0, 1
        )
    return out


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
    runs = causal_runs(np.flatnonzero(mask) + system, row)
    tails = question_tails(system + len(mask), [t for t, _ in questions], [r for _, r in questions])
    rows = sum(run.count for run in runs)
    runs += [run.moved(row + rows) for run in question_runs(system + len(mask), tails)]
    return runs, tails[-1].stop


KERNELS = {
    "cpu_flash": lambda: CPUFlashKernel(),
    "cpu_flash, no joining": lambda: CPUFlashKernel(call_cost=0),
    "cpu_flash, some joining": lambda: CPUFlashKernel(call_cost=20),
    "sdpa": lambda: SDPAKernel(),
    "sdpa, no joining": lambda: SDPAKernel(call_cost=0),
    "varlen": lambda: VarlenKernel(attention=reference_varlen),
    "varlen, small packs": lambda: VarlenKernel(attention=reference_varlen, limit=30),
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
    runs, keys, values, rows = [], [], [], 0
    for mask, system, questions in windows:
        stream, slots = window(mask, system, questions, rows)
        runs.append(stream)
        rows += sum(run.count for run in stream)
        keys.append(torch.randn(KV_HEADS, slots, SIZE, generator=generator))
        values.append(torch.randn(KV_HEADS, slots, SIZE, generator=generator))
    query = torch.randn(HEADS, rows, SIZE, generator=generator)
    kernel = KERNELS[name]()
    got = kernel.attend(kernel.prepare(runs, query), query, keys, values, SCALE)
    torch.testing.assert_close(got, by_hand(runs, query, keys, values), rtol=1e-4, atol=1e-5)


def test_long_runs_are_cut_to_bounded_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_module, "ROWS", 7)
    runs = [[Run(0, 24, prefix=3, tail=3, stop=27)]]
    query, keys = torch.randn(HEADS, 24, SIZE), [torch.randn(KV_HEADS, 27, SIZE)]
    kernel = SDPAKernel(call_cost=0)
    prepared = kernel.prepare(runs, query)
    assert max(block.rows for block in prepared[0]) == 7
    got = kernel.attend(prepared, query, keys, keys, SCALE)
    torch.testing.assert_close(got, by_hand(runs, query, keys, keys), rtol=1e-4, atol=1e-5)


def test_scattered_tokens_are_joined_and_long_runs_are_not() -> None:
    scattered = causal_runs(np.arange(30, 2300, 9))
    blocks = make_blocks(scattered)
    assert 5 <= len(blocks) <= 20
    assert sum(block.rows for block in blocks) == len(scattered)
    apart = causal_runs(np.concatenate([np.arange(0, 256), np.arange(600, 856)]))
    assert [block.visible for block in make_blocks(apart)] == [None, None]


def test_packs_hold_every_run_once_within_the_limit() -> None:
    streams_runs = [causal_runs(np.arange(5, 100, 3)), causal_runs(np.arange(20, 60))]
    streams_runs[1] = [run.moved(streams_runs[0][-1].row + 1) for run in streams_runs[1]]
    packs = make_packs(streams_runs, torch.device("cpu"), limit=300)
    assert [packs[0].row, packs[-1].stop_row] == [0, 72]
    assert all(a.stop_row == b.row for a, b in itertools.pairwise(packs))
    assert all(int(pack.cu_k[-1]) <= 300 or len(pack.cu_k) == 2 for pack in packs)
    assert sum(len(pack.cu_q) - 1 for pack in packs) == sum(map(len, streams_runs))


def test_rotation_is_the_library_s() -> None:
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    x, angle = torch.randn(KV_HEADS, 11, SIZE), torch.randn(11, SIZE // 2)
    cos, sin = torch.cat([angle.cos()] * 2, dim=1), torch.cat([angle.sin()] * 2, dim=1)
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos[None], sin[None])
    torch.testing.assert_close(rotate(x, cos, sin, torch.empty_like(x)), expected[0], rtol=0, atol=1e-6)


def test_the_kernel_fits_device_and_dtype() -> None:
    cpu = torch.device("cpu")
    assert isinstance(choose_kernel(cpu, torch.float32), CPUFlashKernel)
    assert isinstance(choose_kernel(cpu, torch.bfloat16), CPUFlashKernel)
    assert isinstance(choose_kernel(cpu, torch.float16), SDPAKernel)
    assert isinstance(choose_kernel(torch.device("cuda"), torch.bfloat16), VarlenKernel)
    assert isinstance(choose_kernel(torch.device("cuda"), torch.float32), SDPAKernel)
    assert isinstance(choose_kernel(cpu, torch.float32, "sdpa"), SDPAKernel)
    with pytest.raises(ConfigError, match=r"did you mean 'sdpa'"):
        choose_kernel(cpu, torch.float32, "sdp")
    assert kernels.names() == ["cpu_flash", "sdpa", "varlen"]
