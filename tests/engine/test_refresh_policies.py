"""What each policy chooses, at its natural amount and at matched budgets."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.window.refresh.base import KVChange, RefreshContext
from cluster.errors import ConfigError
from cluster.lab.bench.fake_cuda import FakeCuda
from cluster.registry import refresh_policies

BUDGETED = [name for name in refresh_policies.names() if refresh_policies.get(name).budgeted]
LAYERS = 4


def context(
    tokens_per_frame: list[int], anchors: list[int], budget: int | None = None, lost: int = 6, window: int = 5
) -> RefreshContext:
    """An overlap of frames of these sizes, computed once, in one window, ``lost`` tokens of which have left since."""
    counts = np.array(tokens_per_frame, np.int64)
    frame = np.repeat(np.arange(len(counts)), counts)
    count = len(frame)
    offset = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
    anchor = np.isin(frame, anchors)
    return RefreshContext(
        stream="cam",
        window=window,
        system=5,
        layers=LAYERS,
        budget=budget,
        frame=frame,
        offset=offset,
        frame_tokens=np.repeat(counts, counts),
        anchor=anchor,
        context=np.arange(count) + lost,
        lost=np.full(count, lost),
        exact=np.full(count, lost == 0),
    )


def select(name: str, ctx: RefreshContext) -> np.ndarray:
    return refresh_policies.get(name)().select(ctx).mask


STANDARD = context([6, 2, 2, 2, 6, 2, 2, 2], anchors=[0, 4])


def test_the_registry_holds_the_promised_policies() -> None:
    promised = {"all", "none", "anchors", "first_n", "shifted", "random"}
    promised |= {"topk_deviation", "first_percent", "budget"}
    assert set(refresh_policies.names()) >= promised
    with pytest.raises(ConfigError, match="did you mean 'anchors'"):
        refresh_policies.get("anchor")


def test_all_and_none_are_their_own_amount() -> None:
    for budget in (None, 3):
        ctx = replace(STANDARD, budget=budget)
        assert select("all", ctx).all()
        assert not select("none", ctx).any()


def test_anchors_takes_anchor_frames() -> None:
    assert (select("anchors", STANDARD) == STANDARD.anchor).all()


@pytest.mark.parametrize(("budget", "inside", "outside"), [(6, 6, 0), (12, 12, 0), (18, 12, 6)])
def test_anchors_meets_a_budget_evenly(budget: int, inside: int, outside: int) -> None:
    mask = select("anchors", replace(STANDARD, budget=budget))
    assert mask[STANDARD.anchor].sum() == inside
    assert mask[~STANDARD.anchor].sum() == outside
    halves = mask[STANDARD.anchor].reshape(2, 6).sum(axis=1)
    assert abs(int(halves[0] - halves[1])) <= 1


def test_first_n_takes_the_oldest_frames() -> None:
    assert np.flatnonzero(select("first_n", STANDARD)).tolist() == list(range(10))
    assert np.flatnonzero(select("first_n", replace(STANDARD, budget=4))).tolist() == list(range(4))


def test_shifted_takes_as_many_tokens_halfway_between_anchors() -> None:
    mask = select("shifted", STANDARD)
    assert mask.sum() == STANDARD.anchor.sum()
    # Frames 2 and 6 are two frames from any anchor, 7 is three: they come first.
    assert set(STANDARD.frame[mask]) >= {2, 6, 7}
    assert not (mask & STANDARD.anchor).any()


def test_random_draws_anew_per_window_and_stream_and_repeats_itself() -> None:
    first = select("random", STANDARD)
    assert first.sum() == STANDARD.anchor.sum()
    assert (first == select("random", STANDARD)).all()
    assert (first != select("random", replace(STANDARD, window=6))).any()
    assert (first != select("random", replace(STANDARD, stream="other"))).any()


def test_budget_prefers_what_has_little_context_left_and_moves_on() -> None:
    assert np.flatnonzero(select("budget", replace(STANDARD, budget=6))).tolist() == list(range(6))
    # The first ten have just been refreshed: they have lost nothing since.
    fresh = np.arange(len(STANDARD)) < 10
    moved = replace(
        STANDARD,
        budget=4,
        lost=np.where(fresh, 0, 6),
        context=np.where(fresh, np.arange(len(STANDARD)), STANDARD.context),
    )
    assert np.flatnonzero(select("budget", moved)).tolist() == [10, 11, 12, 13]


def test_topk_keeps_what_deviates_most() -> None:
    selection = refresh_policies.get("topk_deviation")().select(replace(STANDARD, budget=3))
    assert selection.mask.all()
    assert selection.narrowing is not None
    assert [selection.narrowing.before(layer) for layer in range(LAYERS)] == [False, True, False, False]
    old = torch.zeros(len(STANDARD), 2, 4)
    new_k, new_v = old.clone(), old.clone()
    new_k[7], new_v[11], new_k[20], new_v[20], new_k[3] = 2.0, -3.0, 1.0, 1.0, 0.5
    keep = selection.narrowing.select_kept(1, KVChange(new_k, new_v, old, old))
    assert keep.nonzero()[:, 0].tolist() == [7, 11, 20]


def test_first_percent_takes_the_first_of_each_frame_fewer_the_deeper() -> None:
    ctx = context([10, 10, 10, 10], anchors=[0], budget=16)
    selection = refresh_policies.get("first_percent")().select(ctx)
    assert selection.mask.reshape(4, 10).sum(axis=1).tolist() == [6, 6, 6, 6]
    assert all((np.flatnonzero(frame) == np.arange(6)).all() for frame in selection.mask.reshape(4, 10))
    amounts, narrowing = [24], selection.narrowing
    assert narrowing is not None
    for layer in range(1, LAYERS):
        if narrowing.before(layer):
            amounts.append(int(narrowing.select_kept(layer, None).sum()))
        else:
            amounts.append(amounts[-1])
    assert amounts == sorted(amounts, reverse=True)
    assert amounts[0] > amounts[-1]
    assert sum(amounts) == 16 * LAYERS


def test_what_first_percent_keeps_is_known_without_asking_the_device() -> None:
    selection = refresh_policies.get("first_percent")().select(context([10, 10, 10, 10], anchors=[0], budget=16))
    with FakeCuda() as cuda:
        cuda.reset()
        kept = selection.narrowing.select_kept(1, None)
        assert (kept.device.type, cuda.syncs, sum(cuda.launches.values())) == ("cpu", 0, 0)


@pytest.mark.parametrize(("budget", "amounts"), [(10, (20, 10, 6, 4)), (30, (40, 30, 26, 24))])
def test_first_percent_follows_the_models_profile_and_never_exceeds_what_there_is(
    budget: int, amounts: tuple[int, ...]
) -> None:
    ctx = replace(context([10, 10, 10, 10], anchors=[0], budget=budget), profile=(2.0, 1.0, 0.6, 0.4))
    selection = refresh_policies.get("first_percent")().select(ctx)
    assert selection.mask.sum() == amounts[0]
    narrowing = selection.narrowing
    assert narrowing is not None
    for layer, (before, now) in enumerate(itertools.pairwise(amounts), 1):
        assert narrowing.before(layer) == (now < before)
        assert narrowing.select_kept(layer, None).sum() == now


@pytest.mark.parametrize("name", BUDGETED)
@settings(deadline=None, max_examples=40)
@given(
    frames=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    anchors=st.sets(st.integers(0, 11)),
    share=st.floats(0, 1),
    lost=st.integers(0, 30),
)
def test_every_policy_spends_exactly_its_budget(
    name: str, frames: list[int], anchors: set[int], share: float, lost: int
) -> None:
    total = sum(frames)
    for budget in (round(share * total), total + 5):
        ctx = context(frames, list(anchors), budget, lost)
        selection = refresh_policies.get(name)().select(ctx)
        assert selection.mask.shape == (total,)
        if selection.narrowing is None:
            assert selection.mask.sum() == min(budget, total)
            continue
        tokens = int(selection.mask.sum())
        layers = tokens
        for layer in range(1, LAYERS):
            if selection.narrowing.before(layer):
                kv = torch.zeros(tokens, 1, 1)
                tokens = int(selection.narrowing.select_kept(layer, KVChange(kv, kv, kv, kv)).sum())
            layers += tokens
        # CacheBlend's budget is what goes on after the probe, VLCache's the mean over layers.
        assert budget == (tokens if name == "topk_deviation" else layers / LAYERS)


@pytest.mark.parametrize("name", refresh_policies.names())
def test_an_overlap_without_tokens_or_anchors_is_no_special_case(name: str) -> None:
    assert select(name, context([], [])).shape == (0,)
    assert select(name, context([3, 3], [])).shape == (6,)
