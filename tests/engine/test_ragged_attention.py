"""One layer's attention over a pool: what it writes, and what rows see."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.native.forward import RaggedAttention
from cluster.engine.native.kernels.blocks import CPUFlashKernel, SDPAKernel
from cluster.engine.window.kv import KVPool
from cluster.engine.window.planner import causal_runs, question_runs, question_tails
from cluster.models.loading import load_model

SCALE = 0.3
MODEL = load_model("tiny-qwen2_5_vl", seed=0)
SLOT_BYTES = KVPool(MODEL).slot_bytes
flags = st.lists(st.booleans(), max_size=40).map(lambda values: np.array(values, dtype=bool))


@pytest.mark.parametrize("kernel", [CPUFlashKernel(), SDPAKernel(), SDPAKernel(call_cost=0)])
@settings(deadline=None, max_examples=30)
@given(overlap=flags, new=st.integers(0, 5), seed=st.integers(0, 99))
def test_rows_see_what_an_explicit_mask_lets_them_see(
    kernel: CPUFlashKernel | SDPAKernel, overlap: np.ndarray, new: int, seed: int
) -> None:
    """In float32, over slots that lie anywhere in the pool."""
    torch.manual_seed(seed)
    system = 3
    computed = np.concatenate((overlap, np.ones(new, dtype=bool)))
    visual = system + len(computed)
    tails = question_tails(visual, [4, 2], [0, 1])
    slots = tails[-1].stop
    pool = KVPool(MODEL, 100 * SLOT_BYTES)
    pool.k.normal_()
    pool.v.normal_()
    (kv_heads, size), heads = pool.k.shape[2:], MODEL.text_config.num_attention_heads
    group = heads // kv_heads
    table = np.random.default_rng(seed).permutation(100)[:slots]
    window = np.flatnonzero(computed) + system
    tail = np.concatenate([np.arange(t.start, t.start + t.tokens) for t in tails])
    rows = np.concatenate((window, tail))
    query = torch.randn(len(rows), heads, size)
    key, value = torch.randn(2, len(rows), kv_heads, size)

    runs = [*causal_runs(window), *(run.moved(len(window)) for run in question_runs(visual, tails))]
    stored = torch.from_numpy(table[rows])
    before = pool.k.clone()
    prepared = kernel.prepare([table], [runs], query)
    got = RaggedAttention(pool, stored, kernel, prepared)(0, query, key, value, SCALE)

    assert torch.equal(pool.k[0, stored], key)
    assert torch.equal(pool.v[0, stored], value)
    others = torch.ones(pool.capacity, dtype=torch.bool)
    others[stored] = False
    assert torch.equal(pool.k[:, others], before[:, others])

    seen = torch.zeros(len(rows), slots, dtype=torch.bool)
    for i, slot in enumerate(rows.tolist()):
        for j in range(slots):
            if slot < visual:
                seen[i, j] = j <= slot
            else:
                mine = next(t for t in tails if t.start <= slot < t.stop)
                seen[i, j] = j < visual or mine.start <= j <= slot
    keys, values = (part[0, torch.from_numpy(table)].transpose(0, 1).double() for part in (pool.k, pool.v))
    for head in range(heads):
        scores = (query[:, head].double() @ keys[head // group].T * SCALE).masked_fill(~seen, -torch.inf)
        expected = torch.softmax(scores, dim=-1) @ values[head // group]
        torch.testing.assert_close(got[:, head].double(), expected, rtol=1e-4, atol=1e-5)
