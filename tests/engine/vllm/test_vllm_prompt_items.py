"""Prompts of items in any order: what is sent, what is refused, and where every token stands."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.vllm.positions import prompt_positions


def test_positions_by_hand() -> None:
    first = torch.tensor([[3, 3], [2, 2], [2, 3]])
    second = torch.tensor([[9], [4], [7]])
    positions, delta = prompt_positions(8, [(2, second, -1), (3, first, 40)])
    assert positions.tolist() == [
        [0, 1, 9, 3, 3, 40, 41, 42],
        [0, 1, 4, 2, 2, 40, 41, 42],
        [0, 1, 7, 2, 3, 40, 41, 42],
    ]
    # The ninth token, number 8, stands at 43.
    assert delta == 43 - 8


@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.lists(st.integers(0, 4), min_size=5, max_size=5),
    st.integers(0, 1000),
)
def test_items_keep_their_positions_and_text_follows(lengths: list[int], gaps: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    items, expected, number, at = [], [], 0, 0
    for gap, length in zip(gaps, lengths, strict=False):
        expected += [[at + i] * 3 for i in range(gap)]
        given = torch.randint(0, 99, (3, length), generator=generator)
        at = int(torch.randint(0, 99, (1,), generator=generator))
        items.append((number + gap, given, at))
        expected += given.T.tolist()
        number += gap + length
    expected += [[at + i] * 3 for i in range(gaps[-1])]
    positions, delta = prompt_positions(len(expected), items)
    assert positions.T.tolist() == expected
    assert len(expected) + delta == at + gaps[-1] if items else delta == 0


def test_items_that_do_not_fit_are_refused() -> None:
    two = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="does not fit"):
        prompt_positions(3, [(2, two, 5)])
    with pytest.raises(ValueError, match="does not fit"):
        prompt_positions(5, [(1, two, 5), (2, two, 5)])
    with pytest.raises(ValueError, match="without a position for the text after it"):
        prompt_positions(5, [(1, two, -1)])


def test_a_request_that_does_not_fit_its_placeholders_never_reaches_vllm() -> None:
    pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")
    from cluster.engine.vllm.prompt_items import WindowItem, check_items

    def item(shape: tuple[int, int] = (2, 8), places: int = 2, after: int | None = 9, dtype: object = torch.float32):
        return WindowItem.of(
            torch.zeros(shape, dtype=dtype), torch.zeros(3, places, dtype=torch.int64), "a", after=after
        )

    check_items([item(after=None), item()], 8, torch.float32)
    for wrong, message in [
        (item((2, 7)), "must be embeddings"),
        (item((0, 8), 0), "at least one"),
        (item(dtype=torch.float16), "float16"),
        (item(places=3), "2 embeddings and must have int64 positions"),
        (item(after=None), "must have `after`"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_items([wrong], 8, torch.float32)
    below = WindowItem(torch.zeros(1, 8), torch.full((3, 1), -1), 0, "x")
    with pytest.raises(ValueError, match="positions begin at 0"):
        check_items([below], 8, torch.float32)


def test_the_key_of_an_item_tells_content_place_and_order_apart() -> None:
    pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")
    from cluster.engine.vllm.prompt_items import WindowItem, content_digest, window_prompt

    embeds, positions = torch.arange(6.0).view(2, 3), torch.arange(6).view(3, 2)
    first = WindowItem.of(embeds, positions, content_digest(embeds))
    others = [
        WindowItem.of(embeds, positions + 1, content_digest(embeds)),
        WindowItem.of(embeds + 1, positions, content_digest(embeds + 1)),
        WindowItem.of(embeds, positions, content_digest(embeds), after=4),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 4
    assert WindowItem.of(embeds.clone(), positions.clone(), content_digest(embeds.clone())).digest == first.digest

    prompt = window_prompt([5, 6], [others[1], first], [7])
    assert prompt["prompt_token_ids"] == [5, 6, 0, 0, 0, 0, 7]
    assert [(place.offset, place.length) for place in prompt["mm_placeholders"]["image"]] == [(2, 2), (4, 2)]
    assert prompt["mm_hashes"]["image"] == [others[1].digest, first.digest]
