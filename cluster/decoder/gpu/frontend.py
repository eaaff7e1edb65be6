"""From decoded pictures on the GPU to kept patches, batched over all cameras of a process with a pending sample."""

import functools
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cluster.codec.nvdec import DevicePicture
from cluster.codec.picture import Outlines
from cluster.codec.privacy import covered_pixels, shrink
from cluster.decoder.gpu.picture import Planes, luma_difference, scale_planes, to_rgb
from cluster.decoder.gpu.replenish import CellMemory, replenish
from cluster.types import (
    THUMBNAIL_STRIDE,
    BoolGrid,
    ChangeGrid,
    FloatGrid,
    FrameSample,
    PatchGrid,
    SampledPicture,
    UInt8Array,
)
from cluster.vision.pruners.base import PruneDecision
from cluster.vision.pruners.replenish import Replenish
from cluster.vision.sampler import FrameSelection, PatchSampler

MOST = 32
"""Largest batch, in pictures: at 1080p, scaling it takes 0.5 GB."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """A sample's results on the host.

    * ``picture``: as it was pruned; ``rgb`` ``[height, width, 3]`` uint8 stays on the device
    * ``difference`` ``[rows, cols]``: see ``ChangeGrid.luma``; ``thumbnail``: luma at every ``THUMBNAIL_STRIDE`` pixels
    * ``frame``: set on the last of its ``T`` samples
    """

    picture: DevicePicture
    rgb: torch.Tensor
    difference: FloatGrid
    thumbnail: UInt8Array
    frame: FrameSample | None = None

    @property
    def index(self) -> int:
        return self.picture.index

    @property
    def pts(self) -> int:
        return self.picture.pts

    @property
    def grid(self) -> PatchGrid:
        return self.picture.grid

    def host_rgb(self) -> UInt8Array:
        """The picture, copied from the device."""
        pixels: UInt8Array = self.rgb.cpu().numpy()
        return pixels


@dataclass(slots=True)
class _Masks:
    """Privacy masks of one camera on the device, for its planes and for the scaled picture."""

    raster: BoolGrid
    luma: torch.Tensor
    chroma: torch.Tensor
    black: torch.Tensor


@dataclass(slots=True, eq=False)
class DeviceCamera:
    """One camera's state on the device; pruning uses the parameters of its ``sampler``'s pruner. Not thread-safe."""

    sampler: PatchSampler
    _grid: PatchGrid | None = field(default=None, init=False)
    _last: torch.Tensor | None = field(default=None, init=False)
    _memory: CellMemory | None = field(default=None, init=False)
    _masks: _Masks | None = field(default=None, init=False)
    _outlines: tuple[Outlines, torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    def planes(self, picture: DevicePicture) -> Planes:
        """The picture's planes with privacy masks applied."""
        planes = Planes.of(picture.frame, picture.codec)
        if picture.masked is None:
            self._masks = None
            return planes
        if self._masks is None or self._masks.raster is not picture.masked:
            grid, device = picture.grid, planes.luma.device
            halved = shrink(picture.masked, planes.chroma.shape[1], planes.chroma.shape[0])
            black = covered_pixels(picture.masked, grid)
            luma, chroma, small = (torch.from_numpy(each).to(device) for each in (picture.masked, halved, black))
            self._masks = _Masks(picture.masked, luma, chroma, small)
        return planes.painted(self._masks.luma, self._masks.chroma)

    def outlined(self, outlines: Outlines | None, rgb: torch.Tensor) -> torch.Tensor:
        """The scaled picture ``[height, width, 3]`` with its zone outlines drawn."""
        if outlines is None:
            return rgb
        if self._outlines is None or self._outlines[0] is not outlines:
            drawn, colours = (torch.from_numpy(each).to(rgb.device) for each in (outlines.drawn, outlines.colours))
            self._outlines = outlines, drawn[..., None], colours
        _, drawn, colours = self._outlines
        return torch.where(drawn, colours, rgb)

    def last(self, grid: PatchGrid, device: torch.device) -> torch.Tensor:
        """Luma of the last sample; a new grid resets it, and the memory."""
        if self._last is None or self._grid != grid:
            self._last = torch.zeros((grid.height, grid.width), dtype=torch.uint8, device=device)
            self._memory, self._grid = None, grid
        return self._last

    def memory(self, grid: PatchGrid, samples: int, device: torch.device) -> CellMemory:
        if self._memory is None:
            self._memory = CellMemory.empty(grid, samples, device)
        return self._memory

    def flush(self) -> FrameSample | None:
        """See :meth:`PatchSampler.flush`."""
        selection = self.sampler.flush_selection()
        return None if selection is None else cut_selections([selection])[0]

    @property
    def black(self) -> torch.Tensor | None:
        """Pixels ``[height, width]`` of the scaled picture under privacy masks."""
        return None if self._masks is None else self._masks.black


@dataclass(frozen=True, slots=True)
class _Job:
    camera: DeviceCamera
    picture: DevicePicture
    done: Future[DeviceSample]


class DeviceFrontend:
    """Processes the pictures of all cameras of a process on their device, in a thread of its own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gpu-frontend", daemon=True)
        self._thread.start()

    def process(self, camera: DeviceCamera, picture: DevicePicture) -> DeviceSample:
        """Prune a sample and cut its patches, batched with other cameras' pending ones.

        The decoder's surface may be released once this returns. Raises ``NotImplementedError``: a format other than
        4:2:0; ``torch.AcceleratorError``: the device has failed for good; ``RuntimeError``: it is out of memory.
        """
        done: Future[DeviceSample] = Future()
        self._jobs.put(_Job(camera, camera.sampler.prepare(picture), done))
        return done.result()

    def _run(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            while len(jobs) < MOST and not self._jobs.empty():
                jobs.append(self._jobs.get())
            # No reference may outlive the batch here: it would hold the decoders' surfaces until the next one.
            self._run_batch(jobs)
            del jobs

    def _run_batch(self, jobs: list[_Job]) -> None:
        groups: dict[tuple[PatchGrid, int], list[tuple[_Job, Planes]]] = {}
        for job in jobs:
            try:
                planes = job.camera.planes(job.picture)
            except Exception as error:
                job.done.set_exception(error)
                continue
            pruner = job.camera.sampler.pruner
            samples = pruner.memory if isinstance(pruner, Replenish) else 0
            groups.setdefault((job.picture.grid, samples), []).append((job, planes))
        try:
            with torch.inference_mode():
                pruned = [each for key, group in groups.items() for each in prune_pictures(*key, group)]
                ready = _ready(pruned)
                selections = [
                    job.camera.sampler.add(job.picture, decision, sample.rgb) for job, decision, sample in ready
                ]
                cut = iter(cut_selections([each for each in selections if each is not None]))
        except Exception as error:
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)
            return
        for (job, _, sample), selection in zip(ready, selections, strict=True):
            job.done.set_result(sample if selection is None else replace(sample, frame=next(cut)))


@functools.cache
def shared_frontend() -> DeviceFrontend:
    """This process's instance."""
    return DeviceFrontend()


def prune_pictures(
    grid: PatchGrid, samples: int, group: Sequence[tuple[_Job, Planes]]
) -> Iterator[tuple[_Job, torch.Tensor, list[torch.Tensor]]]:
    """Scale, compare and prune pictures of one grid.

    Yields:
        The job, its RGB picture, and results being copied to the host: difference, thumbnail, and either mask and
        activity, or the luma for policies that run on the host.
    """
    jobs, planes = [job for job, _ in group], [each for _, each in group]
    cameras, pictures = [job.camera for job in jobs], [job.picture for job in jobs]
    luma, chroma = scale_planes(planes, grid)
    device = luma.device
    rgb = to_rgb(luma, chroma, torch.tensor([each.colour for each in planes]).to(device, non_blocking=True))
    if grid.overlap:
        shown = torch.from_numpy(grid.pixel_sources).to(device)
        luma, rgb = (part.index_select(1, shown).index_select(2, shown) for part in (luma, rgb))
    last = [camera.last(grid, device) for camera in cameras]
    begin = [picture.random_access for picture in pictures]
    black: torch.Tensor | None = None
    if any(camera.black is not None for camera in cameras):
        none = torch.zeros((grid.height, grid.width), dtype=torch.bool, device=device)
        black = torch.stack([none if camera.black is None else camera.black for camera in cameras])
    known = ~torch.tensor(begin).to(device, non_blocking=True)
    difference = luma_difference(luma, torch.stack(last), black, known, grid)
    torch._foreach_copy_(last, list(luma.unbind()))
    results = [difference, luma[:, ::THUMBNAIL_STRIDE, ::THUMBNAIL_STRIDE]]
    if samples:
        whole = np.ones((grid.rows, grid.cols), np.bool_)
        shown_cells = [whole if picture.hidden is None else ~picture.hidden for picture in pictures]
        seen = torch.from_numpy(np.stack(shown_cells)).to(device, non_blocking=True)
        policies = [camera.sampler.pruner for camera in cameras]
        results += replenish(
            [policy for policy in policies if isinstance(policy, Replenish)],
            [camera.memory(grid, samples, device) for camera in cameras],
            luma,
            seen,
            [picture.anchor for picture in pictures],
            begin,
            [picture.fresh for picture in pictures],
            grid,
        )
    else:
        results.append(luma)
    # Asynchronous copies, into pinned memory on CUDA: all are started before the first is awaited.
    host = [each.to("cpu", non_blocking=True) for each in results]
    for place, job in enumerate(jobs):
        # Cloned: a view would keep the whole batch alive until its slowest camera has its next sample.
        outlined = job.camera.outlined(job.picture.outlines, rgb[place].clone())
        yield job, outlined, [each[place] for each in host]


def _ready(
    pruned: Sequence[tuple[_Job, torch.Tensor, list[torch.Tensor]]],
) -> list[tuple[_Job, PruneDecision, DeviceSample]]:
    """Wait for the batch's results on the host and unpack them."""
    for _, rgb, _ in pruned[:1]:
        _wait(rgb.device)
    ready = []
    for job, rgb, parts in pruned:
        difference, thumbnail, *decided = (part.numpy().copy() for part in parts)
        if len(decided) == 2:
            decision = PruneDecision(decided[0], float(decided[1]))
        else:
            decision = _prune_on_host(job, rgb, difference, decided[0])
        ready.append((job, decision, DeviceSample(job.picture, rgb, difference, thumbnail)))
    return ready


def _prune_on_host(job: _Job, rgb: torch.Tensor, difference: FloatGrid, luma: UInt8Array) -> PruneDecision:
    """Prune with a policy that has no batched form."""
    at, still = job.picture, np.zeros_like(difference)
    change = ChangeGrid(still, still, still, difference, cue="luma", frames=1)
    pixels: UInt8Array = rgb.cpu().numpy()
    return job.camera.sampler.pruner.prune(
        SampledPicture(
            at.index, at.pts, at.anchor, at.fresh, at.grid, pixels, luma, change, hidden=at.hidden, gap=at.gap
        )
    )


def cut_selections(selections: Sequence[FrameSelection]) -> list[FrameSample]:
    """Frames with their patches copied to the host; see :func:`cluster.vision.sampler.cut_patches`."""
    grids: dict[PatchGrid, list[FrameSelection]] = {}
    for selection in selections:
        grids.setdefault(selection.frame.grid, []).append(selection)
    patches: dict[int, torch.Tensor] = {}
    for grid, group in grids.items():
        patches |= zip(map(id, group), _cut(grid, group), strict=True)
    for selection in selections[:1]:
        _wait(selection.pictures[0].device)
    return [selection.complete(patches[id(selection)].numpy()) for selection in selections]


def _cut(grid: PatchGrid, group: Sequence[FrameSelection]) -> list[torch.Tensor]:
    pictures = torch.stack([torch.stack(selection.pictures) for selection in group])
    merge, patch = grid.merge, grid.patch
    cells = pictures.reshape(
        len(group), grid.temporal, grid.group_rows, merge, patch, grid.group_cols, merge, patch, 3
    ).permute(0, 2, 5, 3, 6, 1, 8, 4, 7)
    places = np.stack(np.nonzero(np.stack([selection.groups for selection in group])))
    kept = cells[tuple(torch.from_numpy(places).to(pictures.device, non_blocking=True).unbind())]
    counts = [int(np.count_nonzero(selection.groups)) * merge**2 for selection in group]
    parts = torch.split(kept.reshape(-1, grid.temporal, 3, patch, patch), counts)
    return [part.to("cpu", non_blocking=True) if part.is_cuda else part.clone() for part in parts]


def _wait(device: torch.device) -> None:
    """Wait for copies to the host to complete."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
