"""Zones: parts of a camera's picture whose outlines the model sees, so that a question can say "the red zone".

A mark on the picture is how a model without an input for regions is told of one (Shtedritski et al. 2023, "What does
CLIP know about a red circle?"; Yang et al. 2023, "Set-of-Mark Prompting"). Outlines are drawn on samples in the model's
own pixels, in RGB alone: luma, by which change is judged, stays the camera's, and clips and the live view show none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.codec.privacy import Polygon, fill
from cluster.types import BoolGrid, PatchGrid, UInt8Array

COLOURS = {"red": (255, 40, 40), "yellow": (255, 220, 0), "blue": (40, 110, 255), "green": (0, 220, 90)}
"""Names, by which questions speak of a camera's first, second, … zone, and RGB."""

_LINES = 120


@dataclass(frozen=True, slots=True, eq=False)
class Outlines:
    """The pixels of one grid that are ``drawn`` ``[height, width]``, and their ``colours`` ``[height, width, 3]``."""

    drawn: BoolGrid
    colours: UInt8Array

    def draw(self, rgb: UInt8Array) -> UInt8Array:
        """The picture ``[height, width, 3]`` with the outlines."""
        return np.where(self.drawn[..., None], self.colours, rgb)


def outline_zones(zones: Sequence[Polygon], grid: PatchGrid) -> Outlines | None:
    """Outlines inside each polygon, 1/120 of the picture's height wide and two pixels at least; None without zones.

    Where zones overlap, the later one is drawn over the earlier.
    """
    if not zones:
        return None
    height, width = grid.scaled
    drawn, colours = np.zeros((height, width), np.bool_), np.zeros((height, width, 3), np.uint8)
    for zone, colour in zip(zones, COLOURS.values(), strict=False):
        edge = _edge(fill(zone, width, height), max(2, round(height / _LINES)))
        drawn |= edge
        colours[edge] = colour
    if grid.overlap:
        shown = np.ix_(grid.pixel_sources, grid.pixel_sources)
        drawn, colours = drawn[shown], colours[shown]
    return Outlines(drawn, colours)


def _edge(inside: BoolGrid, pixels: int) -> BoolGrid:
    """Pixels inside that are at most ``pixels`` steps from one outside; the picture's border counts as outside."""
    inner = np.pad(inside, 1)
    for _ in range(pixels):
        core = inner[1:-1, 1:-1] & inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]
        inner = np.pad(core, 1)
    edge: BoolGrid = inside & ~inner[1:-1, 1:-1]
    return edge
