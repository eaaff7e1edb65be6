"""Replenishment (:mod:`cluster.vision.pruners.replenish`) batched over cameras, with the same decisions.

The cue is luma only: GPU decoders export no motion vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Self

import torch
import torch.nn.functional as functional

from cluster.decoder.gpu.picture import cell_means, masked_quantile
from cluster.types import PatchGrid
from cluster.vision.pruners.replenish import FLAT, HEAD_START, MAX_GAIN, MOST, RISE, ROUNDS, Replenish


@dataclass(slots=True)
class CellMemory:
    """One camera's cells as last encoded, and their background, as in the pruner. ``levels`` is a ring, ``learnt`` the
    number of levels written since the scene began."""

    luma: torch.Tensor
    means: torch.Tensor
    noise: torch.Tensor
    background: torch.Tensor
    background_means: torch.Tensor
    standing: torch.Tensor
    known: torch.Tensor
    levels: torch.Tensor
    doubted: torch.Tensor
    learnt: int = field(default=0)
    since_compared: int = field(default=0)
    begun: bool = field(default=False)

    @classmethod
    def empty(cls, grid: PatchGrid, samples: int, device: torch.device) -> Self:
        cells = torch.zeros((grid.rows, grid.cols), device=device)
        pixels = torch.zeros((grid.height, grid.width), dtype=torch.uint8, device=device)
        levels = torch.full((samples,), torch.inf, device=device)
        noise, means, standing, known = (cells.clone() for _ in range(4))
        doubted = torch.zeros((), device=device)
        return cls(pixels, cells, noise, pixels.clone(), means, standing, known, levels, doubted)


def replenish(
    policies: Sequence[Replenish],
    memories: Sequence[CellMemory],
    luma: torch.Tensor,
    seen: torch.Tensor,
    anchor: Sequence[bool],
    begin: Sequence[bool],
    fresh: Sequence[bool],
    grid: PatchGrid,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide on one sample ``luma`` ``[n, height, width]`` of each camera, and update the memories with kept cells.

    ``seen`` ``[n, rows, cols]``: cells not hidden by a privacy mask. ``anchor``: samples that keep everything;
    ``begin``: random access samples, which keep everything as video before them is missing; ``fresh``: first of a
    scene. Returns ``mask`` ``[n, rows, cols]`` bool and ``activity`` ``[n]``, see PruneDecision.
    """
    device = luma.device
    unknown = [new or not memory.begun for new, memory in zip(fresh, memories, strict=True)]
    settings = _Settings.of(policies, memories, unknown, device)
    stored_luma, stored_means, stored_noise, standing = (
        torch.stack(each) for each in zip(*((m.luma, m.means, m.noise, m.standing) for m in memories), strict=True)
    )
    whole, first, new = (torch.tensor(flags, device=device)[:, None, None] for flags in (anchor, begin, unknown))
    whole, first = whole | first | new, first | new
    plain = cell_means(luma, grid)
    kept = [any(flags) for flags in zip(anchor, begin, unknown, strict=True)]
    due = _due(policies, memories, kept, unknown)
    exposed, means = settings.expose(luma, plain, stored_means, seen, grid)
    difference = _difference(exposed, stored_luma, means, stored_means, settings.shade, grid)

    thresholds = settings.thresholds(stored_noise, settings.margin, settings.camera)
    changed = (difference > thresholds) & seen
    suspicious = difference > thresholds - settings.credit
    changed_groups = _any_in_group(changed, grid)
    beside = _dilate(changed)
    standing = torch.where(changed | new, 0.0, standing + 1.0)
    spread = changed | (beside & suspicious & (settings.dilation > 0))
    begun = [place for place, begins in enumerate(unknown) if begins]
    if begun:
        at = torch.tensor(begun).to(device, non_blocking=True)
        known = torch.full_like(plain[at], HEAD_START)
        _write([memories[each] for each in begun], background=luma[at], background_means=plain[at], known=known)
        for each in begun:
            memories[each].begun, memories[each].learnt = True, 0
            memories[each].levels.fill_(torch.inf)
            memories[each].doubted.zero_()
    if due:
        at = torch.tensor(due).to(device, non_blocking=True)
        owners, sample = [memories[each] for each in due], (luma[at], plain[at], seen[at])
        theirs = settings.take(at)
        limits = thresholds[at], theirs.thresholds(stored_noise[at], theirs.learning_margin, theirs.learning)
        shown, stood = _foreground(owners, theirs, sample, standing[at], limits, grid)
        spread = spread.index_put((at,), spread[at] | shown)
        standing = standing.index_put((at,), stood)
    groups = _any_in_group(spread, grid)
    mask = groups.repeat_interleave(grid.merge, 1).repeat_interleave(grid.merge, 2)

    noise = stored_noise + torch.minimum(
        torch.maximum(difference - stored_noise, -settings.patience), settings.patience * RISE
    )
    level = masked_quantile(difference.flatten(1), seen.flatten(1), 3, 4)
    # An anchor is stored in its own exposure; later samples are mapped to that.
    store = mask | whole
    stored = torch.where(whole, luma, exposed)
    _write(
        memories,
        luma=torch.where(_pixels(store, grid), stored, stored_luma),
        means=torch.where(store, torch.where(whole, plain, means), stored_means),
        noise=torch.where(first, stored_noise, noise).masked_fill(new, 0.0),
        standing=standing,
    )
    rings = [memory.levels[memory.learnt % len(memory.levels)] for memory in memories]
    learns = [place for place, (gap, begins) in enumerate(zip(begin, unknown, strict=True)) if not (gap or begins)]
    if learns:
        torch._foreach_copy_([rings[place] for place in learns], [level[place] for place in learns])
    for place in learns:
        memories[place].learnt += 1
    activity = torch.where(first[:, 0, 0], 1.0, changed_groups.flatten(1).to(torch.float32).mean(1))
    return store, activity


@dataclass(frozen=True, slots=True)
class _Settings:
    """Parameters of each camera, ``[n, 1, 1]``. ``camera``: its threshold; ``learning``: the background's threshold;
    ``credit``: grey levels by which other evidence lowers the threshold."""

    camera: torch.Tensor
    learning: torch.Tensor
    margin: torch.Tensor
    learning_margin: torch.Tensor
    tolerance: torch.Tensor
    credit: torch.Tensor
    shade: torch.Tensor
    patience: torch.Tensor
    dilation: torch.Tensor
    exposure: torch.Tensor
    settle: torch.Tensor

    def take(self, cameras: torch.Tensor) -> Self:
        return type(self)(*(getattr(self, each.name)[cameras] for each in fields(self)))

    def thresholds(self, noise: torch.Tensor, margin: torch.Tensor, camera: torch.Tensor) -> torch.Tensor:
        """Per-cell thresholds ``[n, rows, cols]``, from the cells' noise, a margin and the camera's threshold."""
        return torch.minimum(torch.maximum(noise + margin, camera), camera * self.tolerance)

    def expose(
        self, luma: torch.Tensor, means: torch.Tensor, reference: torch.Tensor, seen: torch.Tensor, grid: PatchGrid
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures mapped to the exposure of cells with ``reference`` means, and their cell means."""
        gain, offset = fit_exposure(means.flatten(1), reference.flatten(1), seen.flatten(1))
        follows = self.exposure.flatten() > 0
        exposed = apply_exposure(luma, torch.where(follows, gain, 1.0), torch.where(follows, offset, 0.0))
        return exposed, cell_means(exposed, grid)

    @classmethod
    def of(
        cls,
        policies: Sequence[Replenish],
        memories: Sequence[CellMemory],
        unknown: Sequence[bool],
        device: torch.device,
    ) -> Self:
        known = [
            0 if begins else min(memory.learnt, len(memory.levels))
            for memory, begins in zip(memories, unknown, strict=True)
        ]
        rows = [
            (
                policy.margin,
                policy.learning_margin,
                policy.lowest,
                policy.highest,
                policy.tolerance,
                (1.0 - policy.weak) * policy.margin if levels >= policy.calibrated_after else 0.0,
                policy.shade,
                policy.patience,
                policy.dilation,
                policy.exposure,
                policy.settle,
                float(levels >= policy.calibrated_after),
                levels // 4,
            )
            for policy, levels in zip(policies, known, strict=True)
        ]
        table = torch.tensor(rows, dtype=torch.float32).to(device, non_blocking=True)
        margin, learning, lowest, highest, tolerance, *rest, calibrated, quarter = table.unbind(1)
        ordered = torch.stack([memory.levels for memory in memories]).sort(dim=1).values
        noise = ordered.gather(1, quarter.to(torch.int64)[:, None]).squeeze(1)
        by_margin = (
            torch.where(calibrated > 0, torch.minimum(torch.maximum(noise + each, lowest), highest), lowest)
            for each in (margin, learning)
        )
        return cls(*(each[:, None, None] for each in (*by_margin, margin, learning, tolerance, *rest)))


def fit_exposure(now: torch.Tensor, reference: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Batched :func:`cluster.vision.pruners.replenish.fit_exposure`: gain and offset ``[n]`` of rows ``[n, cells]``;
    identity for rows without a ``seen`` cell."""
    shift = masked_quantile(reference - now, seen, 1, 2)
    ratio = masked_quantile(reference / now.clamp_min(1.0), seen, 1, 2)
    by_offset = (reference - now - shift[:, None]).abs()
    by_gain = (reference - ratio[:, None] * now).abs()
    multiplies = masked_quantile(by_gain, seen, 1, 2) < masked_quantile(by_offset, seen, 1, 2)
    error = torch.where(multiplies[:, None], by_gain, by_offset)
    x, y = now.double(), reference.double()
    for _ in range(ROUNDS):
        bound = (3.0 * masked_quantile(error, seen, 1, 2)).clamp_min(1.0)
        agree = seen & (error <= bound[:, None])
        count = agree.sum(1).clamp_min(1)
        mean_x, mean_y = (torch.where(agree, each, 0.0).sum(1) / count for each in (x, y))
        off_x = torch.where(agree, x - mean_x[:, None], 0.0)
        spread = off_x.square().sum(1) / count
        slope = (off_x * (y - mean_y[:, None])).sum(1) / (spread * count)
        gain = torch.where(spread > FLAT, slope.clamp(1.0 / MAX_GAIN, MAX_GAIN), 1.0)
        offset = mean_y - gain * mean_x
        error = (reference - gain.float()[:, None] * now - offset.float()[:, None]).abs()
    none = ~seen.any(1)
    return gain.masked_fill(none, 1.0), offset.masked_fill(none, 0.0)


def apply_exposure(luma: torch.Tensor, gain: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Pictures ``[n, height, width]`` uint8 in the reference exposure; unchanged if no level would change by half."""
    identity = torch.maximum(offset.abs(), (255 * (gain - 1) + offset).abs()) < 0.5
    gain = gain.masked_fill(identity, 1.0).float()[:, None, None]
    offset = offset.masked_fill(identity, 0.0).float()[:, None, None]
    return (luma.float() * gain + offset).round_().clamp_(0, 255).to(torch.uint8)


def _difference(
    luma: torch.Tensor,
    stored: torch.Tensor,
    means: torch.Tensor,
    stored_means: torch.Tensor,
    shade: torch.Tensor,
    grid: PatchGrid,
) -> torch.Tensor:
    """Mean absolute difference per cell, ``[n, rows, cols]`` grey levels, less a change of light within ``shade``."""
    forgiven = shade * stored_means
    shift = torch.minimum(torch.maximum(means - stored_means, -forgiven), forgiven).round().to(torch.int16)
    difference = luma.to(torch.int16) - stored.to(torch.int16) - _pixels(shift, grid)
    return cell_means(difference.abs_().clamp_max_(255), grid)


def _due(
    policies: Sequence[Replenish], memories: Sequence[CellMemory], whole: Sequence[bool], unknown: Sequence[bool]
) -> list[int]:
    """Indices of cameras due to keep standing foreground again, or whose background learns from a sample kept
    ``whole``; cameras whose background is ``unknown`` are excluded."""
    due = []
    for place, (policy, memory) in enumerate(zip(policies, memories, strict=True)):
        memory.since_compared = 0 if unknown[place] else memory.since_compared + 1
        if policy.restate and not unknown[place] and (whole[place] or memory.since_compared >= policy.restate):
            due.append(place)
    return due


def _foreground(
    memories: Sequence[CellMemory],
    settings: _Settings,
    sample: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    standing: torch.Tensor,
    thresholds: tuple[torch.Tensor, torch.Tensor],
    grid: PatchGrid,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare samples with the background, and update it. Returns the foreground cells ``[n, rows, cols]`` and how many
    samples each cell has stood. ``sample``: luma, cell means, and seen cells. ``thresholds``: for showing, and for
    learning."""
    luma, means, seen = sample
    stored, stored_means, known, doubted = (
        torch.stack(each)
        for each in zip(*((m.background, m.background_means, m.known, m.doubted) for m in memories), strict=True)
    )
    waited = torch.tensor([memory.since_compared for memory in memories], dtype=torch.float32)
    for memory in memories:
        memory.since_compared = 0
    before, before_means = stored, stored_means
    stored, stored_means = settings.expose(stored, stored_means, means, seen, grid)
    difference = _difference(luma, stored, means, stored_means, settings.shade, grid)
    differs = (difference > thresholds[1]) & seen
    odd = differs.flatten(1).sum(1) > MOST * seen.flatten(1).sum(1)
    another = (odd & (doubted > 0))[:, None, None]
    aside = odd[:, None, None] & ~another
    known = torch.where(differs | aside, known, known + waited.to(luma.device, non_blocking=True)[:, None, None])
    settled = differs & (standing >= torch.minimum(known, settings.settle)) & ~odd[:, None, None]
    learns = (~_dilate(differs) | settled | another) & ~aside
    _write(
        memories,
        background=torch.where(aside, before, torch.where(_pixels(learns, grid), luma, stored)),
        background_means=torch.where(aside, before_means, torch.where(learns, means, stored_means)),
        known=torch.where(settled, standing, known).masked_fill(another, HEAD_START),
        doubted=(odd & (doubted == 0)).float(),
    )
    stands = differs & ~settled
    shown = stands & ~odd[:, None, None] & (difference > thresholds[0])
    return shown, torch.where(stands | odd[:, None, None], standing, 0.0)


def _dilate(cells: torch.Tensor) -> torch.Tensor:
    """Extend set cells ``[n, rows, cols]`` to their eight neighbours."""
    return functional.max_pool2d(cells.float()[:, None], 3, stride=1, padding=1)[:, 0] > 0


def _pixels(cells: torch.Tensor, grid: PatchGrid) -> torch.Tensor:
    """Expand cells to pixels: ``[n, rows, cols]`` -> ``[n, height, width]``."""
    return cells.repeat_interleave(grid.patch, 1).repeat_interleave(grid.patch, 2)


def _any_in_group(mask: torch.Tensor, grid: PatchGrid) -> torch.Tensor:
    return mask.reshape(-1, grid.group_rows, grid.merge, grid.group_cols, grid.merge).any(4).any(2)


def _write(memories: Sequence[CellMemory], **parts: torch.Tensor) -> None:
    """Copy into tensors owned by each camera: views would keep the whole batch alive for its slowest camera."""
    for dtype in {values.dtype for values in parts.values()}:
        named = [(name, values) for name, values in parts.items() if values.dtype == dtype]
        owned = [getattr(memory, name) for name, _ in named for memory in memories]
        torch._foreach_copy_(owned, [part for _, values in named for part in values.unbind()])
