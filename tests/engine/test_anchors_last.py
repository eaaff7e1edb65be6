"""Refreshing behind what is reused: the order, what rows see in it, and what a window then costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.native import NativeEngine
from cluster.engine.native.attention import RaggedAttention
from cluster.engine.native.kernels.cpu_flash import CPUFlashKernel
from cluster.engine.native.kernels.sdpa import SDPAKernel
from cluster.engine.window.kv import KVPool
from cluster.engine.window.planner import causal_runs, prefix_order, question_runs, question_tails
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel
from cluster.registry import refresh_policies
from cluster.types import StreamSpec

SCALE = 0.3
MODEL = load_model("tiny-qwen2_5_vl", seed=0)
SLOT_BYTES = KVPool(MODEL).slot_bytes
flags = st.lists(st.booleans(), max_size=40).map(lambda values: np.array(values, dtype=bool))


@given(computed=flags, system=st.integers(0, 5), questions=st.integers(0, 6))
def test_the_order_is_that_of_a_prefix_cache(computed: np.ndarray, system: int, questions: int) -> None:
    reused = [system + i for i, c in enumerate(computed) if not c]
    others = [system + i for i, c in enumerate(computed) if c]
    visual = system + len(computed)
    expected = [*range(system), *reused, *others, *range(visual, visual + questions)]
    assert prefix_order(system, computed, visual + questions).tolist() == expected


def test_the_order_of_a_small_window_by_hand() -> None:
    # Two system tokens; an anchor of two, two reused, an anchor of one, one reused; two new; a question of one.
    computed = np.array([1, 1, 0, 0, 1, 0, 1, 1], dtype=bool)
    assert prefix_order(2, computed, 11).tolist() == [0, 1, 4, 5, 7, 2, 3, 6, 8, 9, 10]


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
    query = torch.randn(1, heads, len(rows), size)
    key, value = torch.randn(2, 1, kv_heads, len(rows), size)

    order = prefix_order(system, computed, slots)
    runs = [*causal_runs(np.argsort(order)[window]), *(run.moved(len(window)) for run in question_runs(visual, tails))]
    stored = torch.from_numpy(table[rows])
    before = pool.k.clone()
    prepared = kernel.prepare([table[order]], [runs], query)
    got = RaggedAttention(pool, stored, kernel, prepared)(0, query, key, value, SCALE)

    assert torch.equal(pool.k[0, stored], key[0].transpose(0, 1))
    assert torch.equal(pool.v[0, stored], value[0].transpose(0, 1))
    others = torch.ones(pool.capacity, dtype=torch.bool)
    others[stored] = False
    assert torch.equal(pool.k[:, others], before[:, others])

    seen = torch.zeros(len(rows), slots, dtype=torch.bool)
    for i, slot in enumerate(rows.tolist()):
        for j in range(slots):
            if slot < visual:
                reused = j < system or (j < visual and not bool(computed[j - system]))
                seen[i, j] = reused or j <= slot
            else:
                mine = next(t for t in tails if t.start <= slot < t.stop)
                seen[i, j] = j < visual or mine.start <= j <= slot
    keys, values = (part[0, torch.from_numpy(table)].transpose(0, 1).double() for part in (pool.k, pool.v))
    for head in range(heads):
        scores = (query[0, head].double() @ keys[head // group].T * SCALE).masked_fill(~seen, -torch.inf)
        expected = torch.softmax(scores, dim=-1) @ values[head // group]
        torch.testing.assert_close(got[0, :, head].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("timely", "behind"), [("anchors", "anchors_last"), ("budget", "budget_last")])
def test_the_same_tokens_at_more_context(
    timely: str,
    behind: str,
    model: VisionLanguageModel,
    make_camera: Callable[..., SyntheticCamera],
    make_spec: Callable[..., StreamSpec],
) -> None:
    assert refresh_policies.get(behind).reused_first
    assert not refresh_policies.get(timely).reused_first
    camera = make_camera(kept=0.3)
    engines = {name: NativeEngine(model) for name in (timely, behind)}
    for name, engine in engines.items():
        engine.admit(make_spec(refresh=name))
    slid = 0
    for index in range(20):
        requests = {name: engine.push(camera.sample(index)) for name, engine in engines.items()}
        if not requests[timely]:
            continue
        (before,), (after,) = (engine.step(requests[name]) for name, engine in engines.items())
        first, last = (engine.stats.windows[0] for engine in engines.values())
        assert first.tokens == last.tokens
        if first.tokens.refreshed:
            slid += 1
            # Each refreshed token also sees the reused ones after it: of the first anchor's all there are.
            assert last.attended > first.attended
            assert after.score != before.score
        else:
            assert last.attended == first.attended
    assert slid > 3
