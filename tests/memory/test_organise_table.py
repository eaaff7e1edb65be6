"""The table of clusters by hand, and what it refuses."""

import pytest
import torch

from cluster.memory.organise import ClusterTable, NewTokens


def tokens(keys: list[float], *, frame: int = 0, partition: int = 0) -> NewTokens:
    key = torch.tensor(keys)[:, None]
    count = len(keys)
    return NewTokens(key, -key, torch.full((count,), frame), torch.full((count,), partition))


def filled() -> ClusterTable:
    table = ClusterTable(1, values=True)
    table.add(tokens([2.0, 4.0, 10.0], partition=1), torch.tensor([0, 0, 1]))
    table.add(tokens([9.0, 1.0], frame=3, partition=2), torch.tensor([0, 2]))
    return table


def test_welford_by_hand() -> None:
    table = filled()
    assert table.mean.tolist() == [[5.0], [10.0], [1.0]]
    assert table.value_mean.tolist() == [[-5.0], [-10.0], [-1.0]]
    assert table.count.tolist() == [3, 1, 1]
    # Of 2, 4 and 9 around 5: (9 + 1 + 16) / 3.
    assert table.variance.tolist() == pytest.approx([26 / 3, 0, 0])
    assert table.latest.tolist() == [3, 0, 3]
    assert table.partition.tolist() == [1, 1, 2]
    assert table.uid.tolist() == [0, 1, 2]
    assert table.members(0).tolist() == [0, 1, 3]
    assert table.order().tolist() == [0, 1, 3, 2, 4]


def test_a_cluster_is_of_its_founders_partition() -> None:
    table = ClusterTable(1)
    new = tokens([1.0, 2.0, 3.0])
    mixed = NewTokens(new.key, new.value, new.frame, torch.tensor([7, 8, 9]))
    table.add(mixed, torch.tensor([1, 0, 1]))
    assert table.partition.tolist() == [8, 7]


def test_numbers_close_up_and_uids_stay() -> None:
    table = filled()
    table.columns["mark"] = torch.tensor([5, 6, 7])
    # The second cluster goes, the first loses one member; what is given for the third is not looked at.
    kept = torch.tensor([0, 3, 4])
    key = torch.tensor([[2.0], [9.0], [99.0]])
    touched = table.keep_tokens(kept, key, key, torch.tensor([0, 3, 3]))
    assert touched.tolist() == [True, False]
    assert table.of_token.tolist() == [0, 0, 1]
    assert table.uid.tolist() == [0, 2]
    assert table.mean.tolist() == [[5.5], [1.0]]
    assert table.variance.tolist() == [12.25, 0.0]
    assert table.columns["mark"].tolist() == [5, 7]
    table.add(tokens([3.0], frame=4), torch.tensor([2]))
    assert table.uid.tolist() == [0, 2, 3]
    assert table.columns["mark"].tolist() == [5, 7, 0]


def test_when_nothing_stays_the_table_is_empty_and_its_uids_are_used_up() -> None:
    table = filled()
    none = torch.zeros(0, dtype=torch.int64)
    assert len(table.keep_tokens(none, torch.zeros(0, 1), torch.zeros(0, 1), none)) == 0
    assert len(table) == table.tokens == 0
    table.add(tokens([1.0]), torch.tensor([0]))
    assert table.uid.tolist() == [3]


def test_a_divided_cluster_by_hand() -> None:
    table = filled()
    key = torch.tensor([[2.0], [4.0], [9.0]])
    new = table.split_cluster(0, torch.tensor([False, False, True]), key, -key, torch.tensor([0, 0, 3]))
    assert new == 3
    assert table.mean.tolist() == [[3.0], [10.0], [1.0], [9.0]]
    assert table.variance.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert table.latest.tolist() == [0, 0, 3, 3]
    assert table.partition.tolist() == [1, 1, 2, 1]
    assert table.of_token.tolist() == [0, 0, 1, 3, 2]


def test_a_restored_table_is_the_same_and_its_own() -> None:
    table = filled()
    table.columns["mark"] = torch.tensor([5, 6, 7])
    other = ClusterTable.restore(table.state())
    table.add(tokens([3.0]), torch.tensor([0]))
    assert other.count.tolist() == [3, 1, 1]
    assert other.next_uid == 3
    assert other.columns["mark"].tolist() == [5, 6, 7]


def test_a_state_that_lacks_something_is_refused() -> None:
    state = filled().state()
    del state["variance"], state["next_uid"]
    with pytest.raises(ValueError, match="lacks next_uid, variance"):
        ClusterTable.restore(state)


@pytest.mark.parametrize("cluster", [[1], [-1], [0, 0]])
def test_wrong_numbers_are_refused(cluster: list[int]) -> None:
    with pytest.raises(ValueError, match=r"without gaps|join as many"):
        ClusterTable(1).add(tokens([0.0]), torch.tensor(cluster))


@pytest.mark.parametrize("kept", [[1, 0], [0, 0], [5], [-1]])
def test_tokens_that_cannot_stay_are_refused(kept: list[int]) -> None:
    count = len(kept)
    with pytest.raises(ValueError, match="ascending numbers below 5"):
        filled().keep_tokens(torch.tensor(kept), torch.zeros(count, 1), torch.zeros(count, 1), torch.zeros(count))


@pytest.mark.parametrize("leave", [[True] * 3, [False] * 3, [True, False]])
def test_divisions_into_nothing_are_refused(leave: list[bool]) -> None:
    rows = torch.zeros(3, 1)
    with pytest.raises(ValueError, match="divided"):
        filled().split_cluster(0, torch.tensor(leave), rows, rows, torch.zeros(3))


@pytest.mark.parametrize("short", ["value", "frame", "partition"])
def test_tokens_that_lack_something_are_refused(short: str) -> None:
    new = tokens([1.0, 2.0])
    parts = {name: getattr(new, name) for name in ("key", "value", "frame", "partition")}
    parts[short] = parts[short][:1]
    with pytest.raises(ValueError, match=r"every one of the 2|must both be"):
        NewTokens(**parts)
