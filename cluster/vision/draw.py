"""Shows a keep-mask on its picture: what the model gets to see, for the report and for looking at mistakes."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np

from cluster.types import BoolGrid, UInt8Array

_DIM = 0.35
_LINE = (64, 224, 140)


def overlay(picture: UInt8Array, mask: BoolGrid) -> UInt8Array:
    """``picture`` ``[height, width, 3]`` with pruned cells dark and grey, and a line around what is kept.

    ``mask`` ``[rows, cols]`` may be coarser than the picture by any factor; returns a new array of the picture's shape.
    """
    height, width = picture.shape[:2]
    rows = np.arange(height) * mask.shape[0] // height
    cols = np.arange(width) * mask.shape[1] // width
    kept = mask[rows][:, cols]
    grey = picture.mean(axis=2, keepdims=True)
    dimmed = ((0.5 * picture + 0.5 * grey) * _DIM).astype(np.uint8)
    shown: UInt8Array = np.where(kept[..., None], picture, dimmed)
    shown[_border(kept)] = _LINE
    return shown


def _border(kept: BoolGrid) -> BoolGrid:
    """Kept pixels beside a pruned one."""
    border = np.zeros_like(kept)
    down, across = kept[1:] != kept[:-1], kept[:, 1:] != kept[:, :-1]
    border[1:] |= down
    border[:-1] |= down
    border[:, 1:] |= across
    border[:, :-1] |= across
    return border & kept


def overlay_image(
    picture: UInt8Array, mask: BoolGrid, *, encoding: Literal["png", "jpeg"] = "png", quality: int = 82
) -> bytes:
    """The overlay as a PNG or JPEG file."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.fromarray(overlay(picture, mask))
    image.save(file, "JPEG", quality=quality) if encoding == "jpeg" else image.save(file, "PNG", optimize=True)
    return file.getvalue()
