"""Visual partitions by hand, bounded, and restored."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import ConfigError
from cluster.memory.organise.mosaic import VisualPartitions


def test_frames_that_look_alike_share_a_partition() -> None:
    partitions = VisualPartitions(2, similarity=0.9)
    looks = [[1.0, 0.0], [5.0, 0.1], [0.0, 1.0], [0.1, 3.0], [2.0, 0.2]]
    assert [partitions.add(torch.tensor(look)) for look in looks] == [0, 0, 1, 1, 0]


def test_a_centre_is_the_mean_of_directions() -> None:
    partitions = VisualPartitions(2, similarity=0.5)
    for look in ([100.0, 0.0], [0.6, 0.8]):
        partitions.add(torch.tensor(look))
    assert partitions.summed.tolist() == [pytest.approx([1.6, 0.8])]
    # Alike to within half a right angle from the centre, not from the first frame.
    partitions.similarity = 0.99
    assert partitions.add(torch.tensor([2.0, 1.0])) == 0


def test_when_there_are_enough_the_nearest_takes_what_is_new() -> None:
    partitions = VisualPartitions(3, limit=2)
    looks = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.1, 0.3, 5.0]]
    assert [partitions.add(torch.tensor(look)) for look in looks] == [0, 1, 1]
    assert len(partitions) == 2


def test_restored_partitions_go_on_as_before() -> None:
    rng = torch.Generator().manual_seed(0)
    one = VisualPartitions(4, limit=5, similarity=0.7)
    for look in torch.randn(20, 4, generator=rng):
        one.add(look)
    other = VisualPartitions.restore(one.state())
    looks = torch.randn(20, 4, generator=rng)
    assert [one.add(look) for look in looks] == [other.add(look) for look in looks]


@pytest.mark.parametrize("options", [{"limit": 0}, {"similarity": 1.5}])
def test_options_that_mean_nothing_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="partition"):
        VisualPartitions(2, **options)
