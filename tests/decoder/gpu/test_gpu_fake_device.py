"""The front end on a fake GPU: no operation mixes devices, launches do not follow cameras, and what the host reads."""

import numpy as np
import pytest
import torch

from cluster.codec.nvdec import DevicePicture
from cluster.decoder.gpu import frontend as module
from cluster.decoder.gpu.frontend import DeviceCamera, DeviceFrontend, shared_frontend
from cluster.decoder.gpu.picture import Planes, colour_factors
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.types import PatchGeometry
from cluster.vision.pruners.base import make_pruner
from cluster.vision.sampler import PatchSampler

GRID = PatchGeometry(patch=14, merge=2, temporal=2).grid(1920, 1080)


def picture(index: int, *, size=(1920, 1080), masked: bool = False) -> DevicePicture:
    raster = hidden = None
    if masked:
        raster, hidden = np.zeros((size[1], size[0]), bool), np.zeros((GRID.rows, GRID.cols), bool)
        raster[:200, :200] = hidden[:2, :2] = True
    fresh = index == 0
    # The stand-in for a frame is its size.
    return DevicePicture(index, index, fresh, fresh, GRID, frame=size, codec="h264", masked=raster, hidden=hidden)


@pytest.fixture
def cuda(monkeypatch):
    def planes(size, _codec) -> Planes:
        width, height = size
        luma = torch.zeros((height, width), dtype=torch.uint8, device=DEVICE)
        chroma = torch.zeros((height // 2, width // 2, 2), dtype=torch.uint8, device=DEVICE)
        return Planes(luma, chroma, colour_factors(1, 1), 0.25)

    monkeypatch.setattr(Planes, "of", planes)
    monkeypatch.setattr(module, "_wait", lambda _device: None)
    with FakeCuda() as fake:
        yield fake


def run(frontend: DeviceFrontend, cameras: list[DeviceCamera], index: int, **options) -> None:
    """One batch of a sample of each camera."""
    jobs = [
        module._Job(camera, camera.sampler.prepare(picture(index, **options)), module.Future()) for camera in cameras
    ]
    frontend._run_batch(jobs)
    frames = [job.done.result(0).frame for job in jobs]
    assert all(frame is not None for frame in frames) == bool(index % 2)


def cameras(count: int, policy: str = "replenish") -> list[DeviceCamera]:
    return [DeviceCamera(PatchSampler(f"camera-{n}", make_pruner(policy), 2.0)) for n in range(count)]


@pytest.mark.parametrize("policy", ["replenish", "none"])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_mixes_devices(cuda, policy, masked):
    frontend, two = shared_frontend(), cameras(2, policy)
    for index in range(4):
        run(frontend, two, index, masked=masked)
    run(frontend, two, 4, size=(1280, 720), masked=masked)
    assert cuda.launches


def test_launches_do_not_follow_the_number_of_cameras(cuda):
    """But for one copy of its picture that each camera keeps. The stand-ins for surfaces are zeros."""
    launches = {}
    for count in (1, 16):
        frontend, several = shared_frontend(), cameras(count)
        for index in range(3):
            cuda.reset()
            run(frontend, several, index)
        launches[count] = sum(number for name, number in cuda.launches.items() if name != "aten.zeros")
        # What is pruned comes to the host in one go: difference, thumbnail, mask, activity.
        assert list(cuda.reads.values()) == [4]
    assert launches[16] - launches[1] <= 20
