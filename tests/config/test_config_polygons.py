"""``privacy_masks``: what is taken, and one sentence for what is not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import camera_settings, load_config, parse_camera
from cluster.config.polygon import parse_polygon
from cluster.errors import ConfigError

TRIANGLE = ((0.0, 0.0), (0.3, 0.0), (0.3, 0.5))
QUESTION = {"questions": [{"id": "fence", "text": "Is anyone climbing the fence?"}]}


@pytest.mark.parametrize(
    "written", [TRIANGLE, [[0, 0], [0.3, 0], [0.3, 0.5]], "0,0 0.3,0 0.3,0.5", " 0,0  .3,0 .3,.5 "]
)
def test_forms_of_a_polygon(written):
    assert parse_polygon(written) == TRIANGLE


def test_a_rectangle():
    assert parse_polygon({"x": 0.7, "y": 0.1, "width": 0.3, "height": 0.2}) == (
        (0.7, 0.1),
        (1.0, 0.1),
        (1.0, 0.3),
        (0.7, 0.3),
    )


def test_edges_may_cross():
    assert len(parse_polygon("0,0 1,1 1,0 0,1")) == 4


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("0,0 1,1", "needs 3 to 256 points, not 2"),
        ("", "needs 3 to 256 points, not 0"),
        ([], "needs 3 to 256 points, not 0"),
        ([[0, 0]] * 300, "needs 3 to 256 points, not 300"),
        ("0,0 1.2,0 1,1", "the point 1.2,0 of a polygon is outside the picture"),
        ("0,0 -0.1,0 1,1", "the point -0.1,0 of a polygon is outside"),
        ("0,0 nan,0 1,1", "two numbers x,y, not 'nan,0'"),
        ([[0, 0], [math.nan, 0], [1, 1]], "two numbers x,y"),
        ([[0, 0], [math.inf, 0], [1, 1]], "two numbers x,y"),
        ([[0, 0], [10**400, 0], [1, 1]], "two numbers x,y"),
        ([[0, 0], [True, 0], [1, 1]], "two numbers x,y"),
        ("0,0 1,0,1 1,1", "two numbers x,y, not '1,0,1'"),
        ("0,0 1;0 1,1", "two numbers x,y, not '1;0'"),
        ([[0, 0], "1,0", [1, 1]], "two numbers x,y, not '1,0'"),
        ("0,0 0.5,0.5 1,1", "lie on one line"),
        ("0.2,0.2 0.2,0.2 0.2,0.2", "lie on one line"),
        ({"x": 0, "y": 0, "width": 1}, "has the keys x, y, width, height"),
        ({"x": 0, "y": 0, "width": 0, "height": 1}, "positive width and height"),
        ({"x": 0.5, "y": 0, "width": 0.6, "height": 1}, "outside the picture"),
        (7, "is a list of points"),
    ],
)
def test_what_is_no_polygon(written, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        parse_polygon(written)
    assert "\n" not in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_nonsense_is_refused_with_a_sentence(value):
    try:
        polygon = parse_polygon(value)
    except ValueError:
        return
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in polygon)


def test_a_camera_has_its_masks():
    config = load_config(None, QUESTION)
    entry = parse_camera("gate", "", (), {"privacy_masks": ["0,0 0.3,0 0.3,0.5"]})
    assert camera_settings(config, entry).privacy_masks == [TRIANGLE]
    with pytest.raises(ConfigError, match=r"camera gate: privacy_masks\[0\]: a polygon needs 3 to 256 points, not 1"):
        parse_camera("gate", "", (), {"privacy_masks": ["0,0"]})
    with pytest.raises(ConfigError, match="at most 32"):
        parse_camera("gate", "", (), {"privacy_masks": ["0,0 0.3,0 0.3,0.5"] * 33})
    # The resolved settings travel between processes and are checked again there.
    settings = camera_settings(config, entry)
    assert type(settings).model_validate(settings.model_dump()) == settings
