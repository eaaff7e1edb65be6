"""Procedural surfaces (brick, asphalt, grass …), identical at every resolution except for grain."""

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

# Pictures are float32, but mypy does not infer the precision of arithmetic with Python numbers.
Float = npt.NDArray[np.floating]

_BASE = {
    "asphalt": (92, 93, 96),
    "concrete": (150, 147, 140),
    "gravel": (134, 122, 106),
    "slabs": (158, 154, 146),
    "grass": (96, 122, 66),
    "brick": (150, 96, 78),
    "plaster": (186, 172, 148),
    "sheet": (120, 132, 142),
    "worn": (110, 106, 104),
    "cobble": (126, 124, 126),
    "tiles": (168, 148, 132),
    "panel": (160, 168, 170),
    "hedge": (70, 98, 58),
}

RANDOM = "drawn"
"""A random surface for each seed."""
MIXED = "mixed"
"""A random surface from a wider range: stains, speckles, slats, patches."""

# Roughness: amplitudes of coarse, fine and grain noise, in grey levels.
_ROUGH = {
    "grass": (8, 12, 10),
    "gravel": (5, 10, 12),
    "hedge": (10, 16, 8),
    "asphalt": (6, 5, 6),
    "worn": (12, 6, 6),
    "cobble": (5, 5, 5),
}


def clouds(rng: np.random.Generator, height: int, width: int, knots: int) -> Float:
    """Smooth noise with about unit standard deviation and ``knots`` bumps over the height."""
    cols = max(2, round(knots * width / height))
    grid = rng.normal(0.0, 1.3, (knots + 1, cols + 1)).astype(np.float32)
    return np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)


def texture(name: str, height: int, width: int, seed: int) -> Float:
    """Surface that fills a picture, ``[height, width, 3]`` float32; pattern sizes scale with the height."""
    y = ((np.arange(height, dtype=np.float32) + 0.5) / height)[:, None]
    x = ((np.arange(width, dtype=np.float32) + 0.5) / height)[None, :]
    if name == RANDOM:
        return _random_surface(np.random.default_rng([seed, len(_BASE)]), x, y)
    if name == MIXED:
        return _mixed_surface(np.random.default_rng([seed, len(_BASE) + 1]), x, y)
    rng = np.random.default_rng([seed, sorted(_BASE).index(name)])
    base = np.asarray(_BASE[name], dtype=np.float32) * rng.uniform(0.88, 1.1) + rng.uniform(-8, 8, 3).astype(np.float32)
    coarse, fine, grain = _ROUGH.get(name, (6, 4, 3))
    tone = coarse * clouds(rng, height, width, 5) + fine * clouds(rng, height, width, 40)
    tone = tone + grain * clouds(rng, height, width, 110)
    tone = tone + _pattern(name, x, y)
    picture: Float = base + tone[..., None]
    return picture


def _random_surface(rng: np.random.Generator, x: Float, y: Float) -> Float:
    """Surface of random colour, roughness and pattern."""
    height, width = y.shape[0], x.shape[1]
    grey = rng.uniform(70, 190)
    base = np.asarray(grey + rng.uniform(-28, 28, 3), dtype=np.float32)
    coarse, fine, grain = rng.uniform(2, 11), rng.uniform(2, 14), rng.uniform(1, 11)
    tone = coarse * clouds(rng, height, width, int(rng.integers(3, 9)))
    tone = tone + fine * clouds(rng, height, width, int(rng.integers(20, 60)))
    tone = tone + grain * clouds(rng, height, width, 110)
    turned = float(rng.uniform(-0.3, 0.3))
    along, across = x + turned * y, y - turned * x
    pitch, high, strong = (float(rng.uniform(*bounds)) for bounds in ((0.04, 0.2), (0.03, 0.14), (-24, 24)))
    joint = float(rng.uniform(0.03, 0.16))
    match int(rng.integers(4)):
        case 0:
            tone = tone + np.where((along / pitch % 1 < joint) | (across / high % 1 < joint), strong, 0.0)
        case 1:
            shifted = along / pitch + np.floor(across / high) % 2 * rng.uniform(0.2, 0.8)
            tone = tone + np.where((shifted % 1 < joint / 2) | (across / high % 1 < joint), strong, 0.0)
        case 2:
            tone = tone + strong / 2 * np.sin(2 * np.pi * (along if rng.random() < 0.5 else across) / high)
        case _:
            pass
    picture: Float = base + tone[..., None]
    return picture


def _mixed_surface(rng: np.random.Generator, x: Float, y: Float) -> Float:
    """Two random surfaces in patches, or one with stains, speckles and slats."""
    height, width = y.shape[0], x.shape[1]
    picture = _random_surface(rng, x, y)
    if rng.random() < 0.3:
        other = _random_surface(rng, x, y)
        patches = clouds(rng, height, width, int(rng.integers(2, 14))) > rng.uniform(-0.5, 1.0)
        picture = np.where(patches[..., None], other, picture)
    picture = picture + rng.uniform(-26, 26) + rng.uniform(-14, 14, 3).astype(np.float32)
    if rng.random() < 0.5:
        stains = np.clip(clouds(rng, height, width, int(rng.integers(3, 16))) - rng.uniform(0.0, 1.2), 0, 1)
        picture = picture + (rng.uniform(-38, 38) * stains)[..., None]
    if rng.random() < 0.4:
        speckles = clouds(rng, height, width, int(rng.integers(16, 90))) > rng.uniform(1.2, 2.2)
        picture = picture + np.where(speckles, rng.uniform(-40, 40), 0.0)[..., None]
    if rng.random() < 0.3:
        turned = float(rng.uniform(-1.5, 1.5))
        slats = (x + turned * y) / rng.uniform(0.03, 0.3) % 1
        picture = picture + (rng.uniform(-22, 22) * (slats if rng.random() < 0.5 else slats > 0.5))[..., None]
    mixed: Float = picture.astype(np.float32)
    return mixed


def _pattern(name: str, x: Float, y: Float) -> Any:
    match name:
        case "brick":
            course = y / 0.03
            return np.where((course % 1 < 0.14) | ((x / 0.075 + np.floor(course) % 2 / 2) % 1 < 0.07), 18.0, 0.0)
        case "slabs":
            return np.where(((x + 0.3 * y) / 0.13 % 1 < 0.04) | (y / 0.08 % 1 < 0.06), -20.0, 0.0)
        case "tiles":
            return np.where(((x - 0.2 * y) / 0.09 % 1 < 0.06) | (y / 0.09 % 1 < 0.06), 16.0, 0.0)
        case "cobble":
            row = y / 0.025
            return 9.0 * np.sin(2 * np.pi * (x / 0.035 + np.floor(row) % 2 / 2)) * np.sin(np.pi * (row % 1))
        case "sheet":
            return 8.0 * np.sin(2 * np.pi * x / 0.045)
        case "panel":
            return np.where((x / 0.33 % 1 < 0.02) | (y / 0.14 % 1 < 0.03), -26.0, 0.0)
        case _:
            return 0.0
