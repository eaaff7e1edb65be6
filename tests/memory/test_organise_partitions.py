"""Visual partitions by hand, bounded, and restored."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

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


def test_of_too_many_the_one_that_was_not_seen_for_longest_ends() -> None:
    partitions = VisualPartitions(4, limit=2, similarity=0.9)
    day, night, snow = torch.eye(4)[:3]
    assert [partitions.add(look) for look in (day, night, day)] == [0, 1, 0]
    # Night is the one not seen for longest; when it comes back it is a new one, in place of the day.
    assert [partitions.add(look) for look in (snow, day, snow, night, snow, day)] == [2, 0, 2, 3, 2, 4]
    assert len(partitions) == 2


@given(seed=st.integers(0, 1000), limit=st.integers(1, 5), similarity=st.floats(-0.5, 0.99))
def test_partitions_are_those_of_the_rule_frame_by_frame(seed: int, limit: int, similarity: float) -> None:
    looks = torch.randn(40, 3, generator=torch.Generator().manual_seed(seed))
    partitions = VisualPartitions(3, limit=limit, similarity=similarity)
    centres: dict[int, torch.Tensor] = {}
    used: dict[int, int] = {}
    founded = 0
    for now, look in enumerate(looks):
        unit = look / look.norm()
        cosine = {number: float(torch.cosine_similarity(centre, unit, dim=0)) for number, centre in centres.items()}
        nearest = max(cosine, key=lambda number: cosine[number], default=-1)
        assume(all(abs(each - similarity) > 1e-5 for each in cosine.values()))
        if not cosine or cosine[nearest] < similarity:
            if len(centres) == limit:
                oldest = min(used, key=lambda number: used[number])
                del centres[oldest], used[oldest]
            nearest, founded = founded, founded + 1
            centres[nearest] = torch.zeros(3)
        centres[nearest] = centres[nearest] + unit
        used[nearest] = now
        assert partitions.add(look) == nearest


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
