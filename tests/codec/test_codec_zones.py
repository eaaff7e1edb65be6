"""Zones: where their outlines are, and that nothing but the colours the model sees depends on them."""

from __future__ import annotations

import numpy as np
import pytest
from codec_clips import GEOMETRY, encode, process, read, walk

from cluster.codec.picture import COLOURS, outline_zones
from cluster.types import PatchGeometry

LEFT = ((0.1, 0.2), (0.4, 0.2), (0.4, 0.8), (0.1, 0.8))
RIGHT = ((0.6, 0.2), (0.9, 0.2), (0.9, 0.8))


def winds(polygon, x, y):
    """How often the polygon winds around the point, by the angles its corners are seen at."""
    corners = np.array(polygon) - (x, y)
    angles = np.arctan2(corners[:, 1], corners[:, 0])
    turns = np.diff(np.append(angles, angles[0]))
    return round(((turns + np.pi) % (2 * np.pi) - np.pi).sum() / (2 * np.pi))


def distance(polygon, x, y, width, height):
    """From a point to the nearest edge, in pixels."""
    at, best = np.array([x * width, y * height]), np.inf
    for start, end in zip(polygon, (*polygon[1:], polygon[0]), strict=True):
        a, b = (np.array([u * width, v * height]) for u, v in (start, end))
        share = np.clip(np.dot(at - a, b - a) / np.dot(b - a, b - a), 0, 1)
        best = min(best, float(np.linalg.norm(at - a - share * (b - a))))
    return best


@pytest.mark.parametrize("size", [(640, 360), (1920, 1080)])
def test_an_outline_is_inside_along_the_edges_and_nowhere_else(size):
    grid = PatchGeometry(patch=14, merge=2, temporal=2).grid(*size)
    outlines = outline_zones([LEFT, RIGHT], grid)
    line = max(2, round(grid.height / 120))
    for zone, colour in ((LEFT, "red"), (RIGHT, "yellow")):
        own = (outlines.colours == COLOURS[colour]).all(-1) & outlines.drawn
        assert own.any()
        for row, column in np.argwhere(own)[::7]:
            x, y = (column + 0.5) / grid.width, (row + 0.5) / grid.height
            assert distance(zone, x, y, grid.width, grid.height) <= line + 1.5
        for share in np.linspace(0.05, 0.95, 19):
            for start, end in zip(zone, (*zone[1:], zone[0]), strict=True):
                x, y = (a + share * (b - a) for a, b in zip(start, end, strict=True))
                row, column = int(y * grid.height), int(x * grid.width)
                assert own[max(0, row - 2) : row + 3, max(0, column - 2) : column + 3].any()
    inside = [(row, column) for row, column in np.argwhere(outlines.drawn)[::11]]
    for row, column in inside:
        x, y = (column + 0.5) / grid.width, (row + 0.5) / grid.height
        near = min(distance(zone, x, y, grid.width, grid.height) for zone in (LEFT, RIGHT))
        assert winds(LEFT, x, y) or winds(RIGHT, x, y) or near < 1


def test_an_edge_along_the_pictures_border_is_drawn():
    grid = GEOMETRY.grid(640, 360)
    outlines = outline_zones([((0, 0), (1, 0), (1, 1), (0, 1))], grid)
    assert outlines.drawn[0].all()
    assert outlines.drawn[-1].all()
    assert outlines.drawn[:, 0].all()
    assert not outlines.drawn[grid.height // 2, grid.width // 2]


def test_a_grid_that_shows_its_middle_twice_shows_the_outline_there_twice():
    """Seven patches in eight rows and columns, whose fourth and fifth are one."""
    grid = PatchGeometry(patch=14, merge=2, temporal=1, square=98).grid(640, 360)
    assert grid.overlap == 1
    drawn = outline_zones([LEFT], grid).drawn
    assert drawn.shape == (grid.height, grid.width) == (112, 112)
    assert np.array_equal(drawn[42:56], drawn[56:70])
    assert drawn[42:56].any()


def test_only_the_colours_of_samples_change(tmp_path):
    path = encode(tmp_path / "walk.mp4", walk(48))
    plain, marked = (process(*read(path), zones=zones)[1] for zones in ((), (LEFT,)))
    assert len(plain) == len(marked) > 2
    drawn = outline_zones([LEFT], plain[0].grid).drawn
    for one, other in zip(plain, marked, strict=True):
        assert np.array_equal(one.luma, other.luma)
        assert np.array_equal(one.change.luma, other.change.luma)
        assert (one.index, one.pts, one.anchor, one.fresh) == (other.index, other.pts, other.anchor, other.fresh)
        assert np.array_equal(one.rgb[~drawn], other.rgb[~drawn])
        assert (other.rgb[drawn] == COLOURS["red"]).all()
    assert outline_zones([], plain[0].grid) is None
