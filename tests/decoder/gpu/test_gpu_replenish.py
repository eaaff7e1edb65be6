"""Batched replenishment decides as the pruner of a decoder on the CPU does, camera by camera."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from cluster.decoder.gpu.replenish import CellMemory, apply_exposure, fit_exposure, replenish
from cluster.types import BoolGrid, ChangeGrid, PatchGrid, SampledPicture, UInt8Array
from cluster.vision.pruners import replenish as pruner
from cluster.vision.pruners.replenish import Replenish

GRID = PatchGrid(rows=8, cols=12, patch=14, merge=2, temporal=2)
SHAPE = GRID.height, GRID.width
CPU = torch.device("cpu")


@dataclass
class Scene:
    """A made camera: texture, sensor noise, a moving square, light that drifts and jumps, gaps and anchors;
    two of them are turned for a moment and for longer."""

    seed: int
    hidden: BoolGrid | None = None
    options: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        coarse = self._random.integers(30, 200, (GRID.height // 7, GRID.width // 7))
        self._texture = coarse.repeat(7, 0).repeat(7, 1).astype(float)
        self.host, self.device = (Replenish(**self.options) for _ in range(2))  # type: ignore[arg-type]
        self.memory = CellMemory.empty(GRID, self.device.memory, CPU)

    def luma(self, index: int) -> UInt8Array:
        pixels = self._texture * (1.0 + 0.1 * np.sin(index / 3 + self.seed)) + (12 if index % 7 > 4 else 0)
        top, left = (5 * index) % 80, (9 * index) % 120
        pixels[top : top + 24, left : left + 30] += 45
        if self.seed in (1, 6) and index in (9, 10, 26, 27, 28, 29, 30):
            pixels = np.roll(pixels, 33, 0)
        pixels = pixels + self._random.normal(0, 1 + self.seed % 5, SHAPE)
        return pixels.clip(0, 255).astype(np.uint8)

    def sample(self, index: int) -> SampledPicture:
        still = np.zeros((GRID.rows, GRID.cols), np.float32)
        change = ChangeGrid(still, still, still, still, cue="luma", frames=1)
        luma = self.luma(index)
        fresh, gap = index == 0, index > 0 and (index + self.seed) % 23 == 0
        anchor = fresh or gap or (index + self.seed) % 16 == 0
        rgb = np.zeros((*SHAPE, 3), np.uint8)
        return SampledPicture(index, index, anchor, fresh, GRID, rgb, luma, change, hidden=self.hidden, gap=gap)

    @property
    def seen(self) -> BoolGrid:
        return np.ones((GRID.rows, GRID.cols), np.bool_) if self.hidden is None else ~self.hidden


def hidden(share: float) -> BoolGrid:
    return np.random.default_rng(9).random((GRID.rows, GRID.cols)) < share


def scenes() -> list[Scene]:
    return [
        Scene(0),
        Scene(1, options={"margin": 2.0, "memory": 64, "patience": 0.5}),
        Scene(2, hidden(0.3)),
        Scene(3, hidden(1.0)),
        Scene(4, options={"shade": 0.0, "weak": 1.0, "calibrated_after": 10}),
        Scene(5, options={"lowest": 2.0, "highest": 3.0, "tolerance": 1.0}),
        Scene(6, options={"dilation": 0}),
        Scene(7, options={"exposure": 0, "restate": 0}),
        Scene(8, options={"restate": 3, "settle": 5, "lowest": 12.0}),
    ]


def test_every_decision_of_every_camera_is_the_pruners():
    """Forty samples of nine cameras in one batch each: masks, activity, and what is remembered."""
    cameras = scenes()
    kept = 0.0
    for index in range(40):
        samples = [camera.sample(index) for camera in cameras]
        if index == 20:
            # The quality ladder asks for less.
            for camera in cameras:
                camera.host.margin = camera.device.margin = 6.0
        wanted = [camera.host.prune(sample) for camera, sample in zip(cameras, samples, strict=True)]
        masks, activities = replenish(
            [camera.device for camera in cameras],
            [camera.memory for camera in cameras],
            torch.from_numpy(np.stack([sample.luma for sample in samples])),
            torch.from_numpy(np.stack([camera.seen for camera in cameras])),
            [sample.anchor for sample in samples],
            [sample.random_access for sample in samples],
            [sample.fresh for sample in samples],
            GRID,
        )
        for place, (camera, decision) in enumerate(zip(cameras, wanted, strict=True)):
            assert np.array_equal(masks[place].numpy(), decision.mask), (index, place)
            assert activities[place].item() == pytest.approx(decision.activity, abs=1e-6)
            remembered = camera.host._memory
            assert remembered is not None
            # A change of light may round a pixel the other way.
            pairs = [(camera.memory.luma, remembered.luma), (camera.memory.background, remembered.background.luma)]
            assert all(np.abs(ours.numpy().astype(int) - theirs).max() <= 1 for ours, theirs in pairs)
            assert all((ours.numpy() != theirs).mean() <= 0.005 for ours, theirs in pairs)
            off = np.abs(camera.memory.noise.numpy() - remembered.noise)
            assert off.max() <= 0.06
            assert off.mean() <= 0.005
            assert np.array_equal(camera.memory.standing.numpy(), remembered.standing)
            assert np.array_equal(camera.memory.known.numpy(), remembered.known)
            assert camera.memory.doubted.item() == remembered.doubted
            kept += decision.mask.mean()
    assert 0.05 < kept / 360 < 0.9


def test_exposure_is_the_pruners():
    random = np.random.default_rng(3)
    now = random.uniform(20, 200, (6, 96)).astype(np.float32)
    gains, offsets = np.array([1.0, 1.3, 0.8, 1.0, 1.1, 3.0]), np.array([0.0, 0.0, 0.0, 15.0, -9.0, 0.0])
    reference = (now * gains[:, None] + offsets[:, None] + random.normal(0, 0.5, now.shape)).astype(np.float32)
    # Something moves in a third of the picture.
    reference[:, :30] += random.uniform(30, 80, (6, 30)).astype(np.float32)
    seen = random.random(now.shape) < 0.9
    seen[5] = False
    gain, offset = fit_exposure(torch.from_numpy(now), torch.from_numpy(reference), torch.from_numpy(seen))
    for row in range(5):
        wanted = pruner.fit_exposure(now[row][seen[row]], reference[row][seen[row]])
        assert gain[row].item() == pytest.approx(wanted.gain, rel=1e-5)
        assert offset[row].item() == pytest.approx(wanted.offset, abs=1e-3)
        luma = random.integers(0, 256, SHAPE, dtype=np.uint8)
        mapped = apply_exposure(torch.from_numpy(luma)[None], gain[row : row + 1], offset[row : row + 1])
        assert np.abs(mapped[0].numpy().astype(int) - wanted.apply(luma)).max() <= (0 if wanted.is_identity else 1)
    assert (gain[5].item(), offset[5].item()) == (1.0, 0.0)
