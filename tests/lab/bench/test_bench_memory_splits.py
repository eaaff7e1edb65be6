"""The measurement of deferred splits, on frames whose figures are known."""

import pytest
import torch

from cluster.lab.bench.memory.footage import Asked
from cluster.lab.bench.memory.splits import measure_splits
from cluster.memory.head_memory import KVChunk
from cluster.types import MICROSECONDS

LAYERS, HEADS, TOKENS, WIDTH = 2, 1, 4, 8


def left(frames: int, *, spread: float, seed: int = 0) -> list[KVChunk]:
    """Frames whose keys lie ``spread`` around directions that change every eight frames."""
    rng = torch.Generator().manual_seed(seed)
    around = torch.nn.functional.normalize(torch.randn(frames // 8 + 1, 1, 1, 1, WIDTH, generator=rng), dim=-1)
    shape = (LAYERS, HEADS, TOKENS, WIDTH)
    return [
        KVChunk(
            stream="camera",
            index=number,
            pts=number * MICROSECONDS // 2,
            key=around[number // 8 if spread else 0] + spread * torch.randn(shape, generator=rng),
            value=torch.randn(shape, generator=rng),
            cell=torch.arange(TOKENS),
            rows=2,
            columns=2,
            mean_embedding=torch.ones(3),
        )
        for number in range(frames)
    ]


def questions(*frames: int) -> list[Asked]:
    rng = torch.Generator().manual_seed(9)
    return [Asked(at, [torch.randn(HEADS, 2, WIDTH, generator=rng) for _ in range(LAYERS)]) for at in frames]


def test_deferring_splits_less_and_fetches_nothing_for_it() -> None:
    figures = measure_splits(left(64, spread=0.3), questions(8, 16, 32, 48, 64), block=4, share=0.25)
    assert figures["splits_eager"] > figures["splits_deferred"]
    assert figures["saving"] == pytest.approx(1 - figures["splits_deferred"] / figures["splits_eager"])
    assert figures["fetched_deferred"] == 0 < figures["fetched_eager"] <= figures["splits_eager"]
    for name in ("eager", "deferred"):
        made = figures[f"splits_{name}"] + figures[f"founded_{name}"]
        assert figures[f"clusters_{name}"] == made - figures[f"merged_{name}"]
        assert 0.25 <= figures[f"loaded_{name}"] < figures[f"recall_{name}"] < 1


def test_who_loads_everything_misses_nothing() -> None:
    figures = measure_splits(left(16, spread=0.3), questions(8, 16), block=4, share=1.0, top=5)
    assert figures["recall_eager"] == figures["loaded_eager"] == 1
    assert figures["recall_deferred"] == figures["loaded_deferred"] == 1


def test_where_all_keys_are_the_same_nothing_is_split() -> None:
    figures = measure_splits(left(16, spread=0.0), questions(16), block=4)
    assert figures["clusters_eager"] == figures["clusters_deferred"] == LAYERS * HEADS
    assert figures["splits_eager"] == figures["put_off"] == figures["saving"] == 0


def test_questions_before_the_first_block_are_not_counted() -> None:
    figures = measure_splits(left(16, spread=0.3), questions(3), block=8, similarity=0.5)
    assert figures["loaded_eager"] == figures["recall_eager"] == 0
