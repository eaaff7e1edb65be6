"""Validation of streams and frames against an engine's model."""

import math

import numpy as np
import torch

from cluster.engine.window.windows import LOOKBACK
from cluster.errors import ConfigError
from cluster.models.base import FrameSpan, VisionLanguageModel
from cluster.registry import refresh_policies
from cluster.types import MICROSECONDS, FrameSample, PatchGeometry, StreamSpec


def check_spec(spec: StreamSpec, model: VisionLanguageModel) -> None:
    """Check that a stream can be served. Raises ``ConfigError``: unknown policy, invalid lengths, no questions, or a
    window that exceeds the model's positions."""
    name = spec.stream
    refresh_policies.get(spec.refresh)
    if not 0 < spec.stride_s <= spec.window_s or not math.isfinite(spec.window_s):
        raise ConfigError(
            f"{name}: stride_s must be above 0 and at most window_s ({spec.window_s:g}), not {spec.stride_s:g}"
        )
    if spec.refresh_budget is not None and not 0 <= spec.refresh_budget <= 1:
        raise ConfigError(f"{name}: refresh_budget is a share of the overlap, 0 to 1, not {spec.refresh_budget:g}")
    ids = [question.id for question in spec.questions]
    if not ids or len(set(ids)) < len(ids):
        raise ConfigError(f"{name}: give at least one question, each with a unique id, not {ids}")
    limit = getattr(model.text_config, "max_position_embeddings", math.inf)
    longest = _longest_position(spec, model)
    if longest > limit:
        raise ConfigError(
            f"{name}: a window of {spec.window_s:g} s at {spec.fps:g} samples a second reaches position {longest}, but "
            f"the model's limit is {limit}; shorten the window, sample less often, shorten the anchor interval (a "
            "window may open that much earlier), or reduce the model's pixels"
        )


def _longest_position(spec: StreamSpec, model: VisionLanguageModel) -> int:
    """Largest position in a window; pruned tokens keep their positions."""
    grid, frames = model.geometry.largest, most_frames(spec, model.geometry)
    cells = torch.cartesian_prod(torch.arange(grid.group_rows), torch.arange(grid.group_cols))
    last = FrameSpan((frames - 1) * model.geometry.temporal / spec.fps, frames - 1, cells, grid)
    positions = model.window_positions(len(model.system_ids()), [last])
    questions = max(len(model.question_ids(question.text)) for question in spec.questions)
    return max(int(positions.frames[0].max()), positions.next) + questions


def most_frames(spec: StreamSpec, geometry: PatchGeometry) -> int:
    """Maximum number of frames in a window, which opens as early as it may."""
    lookback_s = min(spec.lookback_s, LOOKBACK / MICROSECONDS)
    return sum(math.ceil(seconds * spec.fps / geometry.temporal) for seconds in (spec.window_s, lookback_s))


def check_sample(sample: FrameSample, geometry: PatchGeometry) -> None:
    """Raise ``ValueError`` if a frame's grid, mask or patches do not fit the model's geometry."""
    grid = sample.grid
    name = f"frame {sample.index} of {sample.stream}"
    cut = (grid.patch, grid.merge, grid.temporal)
    wanted = (geometry.patch, geometry.merge, geometry.temporal)
    if cut != wanted:
        raise ValueError(f"{name} is cut for another model: patch, merge, temporal are {cut}, not {wanted}")
    if sample.mask.shape != (grid.rows, grid.cols) or sample.duration <= 0:
        raise ValueError(
            f"{name} must have a mask of {grid.rows}x{grid.cols} and a positive duration, "
            f"not {sample.mask.shape} and {sample.duration}"
        )
    kept = int(sample.mask.sum())
    groups = int(sample.mask[:: grid.merge, :: grid.merge].sum())
    shape = (kept, grid.temporal, 3, grid.patch, grid.patch)
    if sample.patches.shape != shape or sample.patches.dtype != np.uint8 or kept != groups * grid.merge**2:
        raise ValueError(
            f"{name} must have whole merge groups and uint8 patches of shape {shape}, "
            f"not {sample.patches.dtype} of {sample.patches.shape}"
        )
