"""Dense labels, worked out by hand on a small grid."""

from dataclasses import dataclass

import numpy as np
import pytest

from cluster.lab.scenes.vocabulary import SceneEvent
from cluster.lab.training.pruning import LABELS, MIN_COVERAGE, coverage, token_labels
from cluster.types import PatchGrid

GRID = PatchGrid(4, 8, 14, 2, 2)


@dataclass(frozen=True)
class Thing:
    id: int
    kind: str
    state: str
    box: tuple[float, float, float, float]
    velocity: tuple[float, float] = (0.0, 0.0)
    colour: str = "red"
    lane: str = ""


def hot(labels, name: str) -> list[list[int]]:
    return labels.hot[:, LABELS.index(name)].reshape(2, 4).tolist()


def test_a_box_counts_where_it_covers_a_fifth_of_the_token() -> None:
    # Tokens are 0.25 wide and 0.5 high. The box covers the second token's right 40 % and the third's left 10 %.
    share = coverage((0.40, 0.0, 0.525, 0.5), 2, 4)
    assert share[0] == pytest.approx([0, 0.8, 0.2, 0])
    assert share[1] == pytest.approx([0, 0, 0, 0])


def test_an_object_smaller_than_a_token_counts_by_its_own_size() -> None:
    share = coverage((0.24, 0.1, 0.28, 0.2), 2, 4)
    assert share[0, 0] == pytest.approx(0.25)
    assert share[0, 1] == pytest.approx(0.75)
    assert share.sum() == pytest.approx(1.0)


def test_what_either_instant_shows_is_labelled() -> None:
    before = Thing(3, "person", "walking", (0.0, 0.0, 0.25, 0.5), (0.2, 0.0), "blue")
    after = Thing(3, "person", "lying", (0.25, 0.0, 0.5, 0.5), (0.1, 0.0), "blue")
    fall = SceneEvent("fall", 5.0, 20.0, (3,))
    labels = token_labels([(4.8, [before]), (5.3, [after])], [fall], GRID)
    assert hot(labels, "kind:person") == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert hot(labels, "color:blue") == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert hot(labels, "state:walking") == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert hot(labels, "state:lying") == [[0, 1, 0, 0], [0, 0, 0, 0]]
    # The event lasts at the second instant only.
    assert hot(labels, "event:fall") == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert labels.covered.tolist() == [True, True, False, False, False, False, False, False]
    assert labels.velocity[:2].tolist() == [[pytest.approx(0.2), 0.0], [pytest.approx(0.1), 0.0]]
    assert labels.hot.sum() == 2 + 2 + 1 + 1 + 1


def test_an_event_marks_its_actors_only() -> None:
    actor = Thing(1, "vehicle", "driving", (0.5, 0.5, 0.75, 1.0))
    other = Thing(2, "vehicle", "driving", (0.0, 0.5, 0.25, 1.0))
    labels = token_labels([(1.0, [actor, other])], [SceneEvent("wrong_way", 0.0, 9.0, (1,))], GRID)
    assert hot(labels, "kind:vehicle") == [[0, 0, 0, 0], [1, 0, 1, 0]]
    assert hot(labels, "event:wrong_way") == [[0, 0, 0, 0], [0, 0, 1, 0]]


def test_a_vehicle_is_labelled_with_its_lane() -> None:
    near = Thing(1, "vehicle", "driving", (0.5, 0.5, 0.75, 1.0), lane="near")
    far = Thing(2, "vehicle", "driving", (0.0, 0.0, 0.25, 0.5), lane="far")
    labels = token_labels([(1.0, [near, far, Thing(3, "vehicle", "parked", (0.75, 0.5, 1.0, 1.0))])], [], GRID)
    assert hot(labels, "lane:near") == [[0, 0, 0, 0], [0, 0, 1, 0]]
    assert hot(labels, "lane:far") == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_velocity_is_that_of_what_covers_most() -> None:
    far = Thing(1, "person", "walking", (0.0, 0.0, 0.06, 0.5), (0.5, 0.0))
    near = Thing(2, "vehicle", "driving", (0.0, 0.0, 0.25, 0.5), (-0.3, 0.1))
    for order in ([far, near], [near, far]):
        labels = token_labels([(0.0, order)], [], GRID)
        assert labels.velocity[0] == pytest.approx([-0.3, 0.1])


def test_too_little_of_a_large_object_is_no_label() -> None:
    sliver = Thing(1, "person", "walking", (0.0, 0.0, 0.25 + 0.24 * MIN_COVERAGE, 1.0))
    labels = token_labels([(0.0, [sliver])], [], GRID)
    assert hot(labels, "kind:person") == [[1, 0, 0, 0], [1, 0, 0, 0]]


def test_taking_tokens_takes_all_their_labels() -> None:
    thing = Thing(1, "bag", "left", (0.0, 0.0, 0.5, 1.0), (0.0, 0.2))
    labels = token_labels([(0.0, [thing])], [], GRID)
    some = labels.take(np.array([0, 3, 4]))
    assert some.covered.tolist() == [True, False, True]
    assert some.hot.shape == (3, len(LABELS))
    assert some.velocity[:, 1] == pytest.approx([0.2, 0.0, 0.2])
