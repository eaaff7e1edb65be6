"""The front end as cameras call it: the patches of many cameras from one batch, equal to those of the CPU's path."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.codec.file import FileSource
from cluster.codec.nvdec import DevicePicture
from cluster.codec.picture import outline_zones
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.decoder.gpu.frontend import DeviceCamera, DeviceFrontend, DeviceSample, shared_frontend
from cluster.lab.bench.gpu_frontend import compare_clips, host_nvdec
from cluster.lab.scenes.street_clips import make_clip
from cluster.types import PatchGeometry
from cluster.vision.pruners.base import make_pruner
from cluster.vision.sampler import PatchSampler, cut_patches

QWEN = PatchGeometry(patch=14, merge=2, temporal=2)


def device_pictures(path, **options) -> list[DevicePicture]:
    source = FileSource(path)
    processor = CodecProcessor(QWEN, CodecOptions(decode="cuda", **options), host_nvdec())
    processor.open(source.open())
    found = []
    for packet in source.packets():
        assert processor.feed(packet) == []
        found += processor.pop_device_pictures()
    processor.drain()
    return found + processor.pop_device_pictures()


def camera(policy: str = "replenish") -> DeviceCamera:
    return DeviceCamera(PatchSampler("cam", make_pruner(policy), 2.0))


def process(pictures: list[DevicePicture], policy: str = "replenish") -> list[DeviceSample]:
    frontend, one = shared_frontend(), camera(policy)
    return [frontend.process(one, picture) for picture in pictures]


@pytest.fixture
def benchmark_clips(clips, monkeypatch):
    """The benchmark makes none again."""
    made = dict(clips)
    monkeypatch.setattr("cluster.lab.bench.gpu_frontend.made_clips", lambda _folder: made)
    return made


def test_the_same_cells_are_kept_of_clips_as_by_a_decoder_on_the_cpu(clips, benchmark_clips):
    """The benchmark's four made clips, and one more file."""
    rows = compare_clips([clips["street"]])
    assert [row["clip"] for row in rows] == [*clips, "street"]
    assert rows[-1]["equal"] == rows[0]["equal"]
    for row in rows:
        assert row["equal"] >= 0.999, row
        assert row["levels"] <= 5
        assert row["pixels_off"] < 0.02
        assert row["kept"] == pytest.approx(row["kept_on_device"], abs=0.001)
    assert max(row["kept"] for row in rows) > 0.05


def test_a_grid_that_shows_the_middle_twice_is_the_same_on_the_device(clips, benchmark_clips, monkeypatch):
    """Seven by seven patches in eight rows and columns, whose fourth and fifth are one."""
    benchmark_clips.clear()
    square = PatchGeometry(patch=14, merge=2, temporal=1, square=98)
    monkeypatch.setattr("cluster.lab.bench.gpu_frontend.GEOMETRY", square)
    for row in compare_clips([clips["street"], clips["noisy"]]):
        assert row["equal"] >= 0.999, row
        assert row["levels"] <= 5
        assert row["kept"] == pytest.approx(row["kept_on_device"], abs=0.001)


def test_zones_are_outlined_on_the_device_and_change_nothing_else(clips):
    zone = ((0.1, 0.2), (0.6, 0.2), (0.5, 0.8))
    plain, marked = (process(device_pictures(clips["street"], zones=zones)[:6]) for zones in ((), (zone,)))
    for one, other in zip(plain, marked, strict=True):
        outlines = outline_zones([zone], one.grid)
        assert np.array_equal(other.host_rgb(), outlines.draw(one.host_rgb()))
        assert not np.array_equal(other.host_rgb(), one.host_rgb())
        assert np.array_equal(one.difference, other.difference)
        assert np.array_equal(one.thumbnail, other.thumbnail)
        if one.frame is not None:
            assert np.array_equal(one.frame.mask, other.frame.mask)


def test_patches_are_those_of_the_pictures_on_the_device(clips):
    samples = process(device_pictures(clips["street"])[:8])
    assert [sample.frame is not None for sample in samples] == [False, True] * 4
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        frame = second.frame
        groups = frame.mask[::2, ::2]
        assert np.array_equal(frame.patches, cut_patches([first.host_rgb(), second.host_rgb()], groups, frame.grid))
        assert frame.pts == first.picture.pts


def test_one_batch_of_cameras_of_different_sizes_is_each_of_them_alone(clips, tmp_path):
    """They wait for each other, so that each batch has a sample of every camera."""
    shapes = {"small": (320, 180), "tall": (240, 320), "wide": (640, 360)}
    paths = {name: tmp_path / f"{name}.mp4" for name in shapes}
    for name, size in shapes.items():
        make_clip("street", paths[name], seconds=3.0, size=size)
    mask = ((0.0, 0.0), (0.5, 0.0), (0.5, 0.6), (0.0, 0.6))
    jobs = [(device_pictures(path, masks=masks)[:10], policy) for path in paths.values() for masks in ((), (mask,))
            for policy in ("replenish", "none")]  # fmt: skip
    alone = [process(pictures, policy) for pictures, policy in jobs]
    frontend, together = DeviceFrontend(), threading.Barrier(len(jobs))
    batches: list[int] = []
    run_batch = frontend._run_batch
    frontend._run_batch = lambda batch: (batches.append(len(batch)), run_batch(batch))[1]

    def drive(job):
        one = camera(job[1])
        found = []
        for picture in job[0]:
            together.wait(20)
            found.append(frontend.process(one, picture))
        return found

    with ThreadPoolExecutor(len(jobs)) as threads:
        for wanted, found in zip(alone, threads.map(drive, jobs), strict=True):
            for one, other in zip(wanted, found, strict=True):
                assert np.array_equal(one.difference, other.difference)
                assert np.array_equal(one.thumbnail, other.thumbnail)
                assert torch.equal(one.rgb, other.rgb)
                if one.frame is not None:
                    assert np.array_equal(one.frame.mask, other.frame.mask)
                    assert np.array_equal(one.frame.patches, other.frame.patches)
                    assert one.frame.activity == pytest.approx(other.frame.activity, abs=1e-6)
    assert max(batches) > 1


def test_what_a_mask_covers_is_black_and_is_not_kept(clips):
    mask = ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.0, 1.0))
    samples = process(device_pictures(clips["street"], masks=(mask,))[:6])
    for sample in samples:
        half = sample.picture.grid.width // 2
        assert sample.host_rgb()[:, : half - 8].max() <= 1
        assert sample.host_rgb()[:, half + 8 :].max() > 100
        assert sample.difference[:, : sample.picture.grid.cols // 2].max() == 0
    pruned = [sample.frame for sample in samples if sample.frame is not None and not sample.frame.anchor]
    assert pruned
    assert not any(frame.mask[:, : frame.grid.cols // 2].any() for frame in pruned)


@pytest.mark.parametrize("policy", ["none", "codecsight"])
def test_policies_without_a_batched_form_run_on_the_host(clips, policy):
    frames = [sample.frame for sample in process(device_pictures(clips["street"])[:8], policy) if sample.frame]
    assert frames[0].complete
    assert all(frame.complete for frame in frames) == (policy == "none")


def test_a_frame_that_waits_is_completed_at_the_end(clips):
    frontend, one = shared_frontend(), camera()
    sample = frontend.process(one, device_pictures(clips["street"])[0])
    assert sample.frame is None
    last = one.flush()
    assert last.complete
    assert np.array_equal(last.patches[:, 0], last.patches[:, 1])
    assert one.flush() is None


def test_a_picture_that_fails_fails_alone(clips):
    """A format that cannot be exported; the other camera of the batch has its sample."""
    good, other = device_pictures(clips["street"])[:2]
    bad = replace(good, frame=good.frame.reformat(format="yuv444p"))
    frontend = shared_frontend()
    with ThreadPoolExecutor(2) as threads:
        failed = threads.submit(frontend.process, camera(), bad)
        fine = threads.submit(frontend.process, camera(), good)
        assert fine.result(20).picture is not None
        with pytest.raises(NotImplementedError, match="yuv444p"):
            failed.result(20)
    assert frontend.process(camera(), other).frame is None


def test_a_failing_device_fails_every_camera_and_the_thread_goes_on(clips, monkeypatch):
    picture = device_pictures(clips["street"])[0]
    frontend = shared_frontend()

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("cluster.decoder.gpu.frontend.scale_planes", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            frontend.process(camera(), picture)
    assert frontend.process(camera(), picture).picture is not None
