"""Where a camera is decoded, end to end: frames come whatever the GPU does, and the status says what it did."""

import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.codec import CameraState, FileSource, PushSource
from cluster.codec.nvdec import Nvdec, shared_nvdec
from cluster.config import SightlineConfig, camera_settings
from cluster.config.camera import CameraEntry
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings, PipelineStatus, pipeline_settings
from cluster.lab.bench.gpu_frontend import host_nvdec
from cluster.lab.scenes.street_clips import make_clip
from cluster.types import FrameSample, PatchGeometry
from cluster.vision.sampler import Cut

QWEN = PatchGeometry(patch=14, merge=2, temporal=2)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Twelve seconds, of which each sample has a successor."""
    path = tmp_path_factory.mktemp("device") / "street.mp4"
    make_clip("street", path, seconds=12.0, size=(320, 180))
    return path


class Run:
    """One camera to its end; what it sent, and its status while it ran."""

    def __init__(self, source, settings: PipelineSettings, nvdec: Nvdec | None = None, then=None) -> None:
        self.frames: list[FrameSample] = []
        footage = CameraFootage()
        self.latest = footage.latest
        self.running: list[PipelineStatus] = []
        ended = threading.Event()
        self.pipeline = CameraPipeline(
            "gate", source, QWEN, settings, self._send, lambda _: ended.set(), footage, nvdec=nvdec
        )
        self._then = then or (lambda _run: None)
        self.pipeline.start()
        assert ended.wait(DEADLINE_S)
        assert self.pipeline.stop(DEADLINE_S)
        self.status = self.pipeline.status()

    def _send(self, frame: FrameSample, cut: Cut) -> None:
        self.frames.append(replace(frame, patches=cut()))
        self.running.append(self.pipeline.status())
        self._then(self)


def test_a_camera_on_the_gpu_sends_what_one_on_the_cpu_sends(clip, caplog):
    with caplog.at_level(logging.INFO, "cluster.decoder.pipeline"):
        device = Run(FileSource(clip), PipelineSettings(decode="cuda"), host_nvdec())
    host = Run(FileSource(clip), PipelineSettings())
    assert (device.status.state, device.status.decode, device.status.reason) == (CameraState.ENDED, "cuda", "")
    assert {status.reason for status in device.running} == {""}
    assert caplog.messages == ["camera gate decodes on the GPU"]
    assert len(device.frames) == len(host.frames) == 12
    for ours, theirs in zip(device.frames, host.frames, strict=True):
        assert (ours.index, ours.pts, ours.duration, ours.anchor, ours.fresh, ours.gap, ours.grid) == (
            theirs.index,
            theirs.pts,
            theirs.duration,
            theirs.anchor,
            theirs.fresh,
            theirs.gap,
            theirs.grid,
        )
        if ours.anchor:
            assert np.abs(ours.patches.astype(int) - theirs.patches).max() <= 5
    # Vectors add little to luma.
    shares = [np.mean([frame.mask.mean() for frame in run.frames if not frame.anchor]) for run in (device, host)]
    assert shares[0] == pytest.approx(shares[1], abs=0.02)
    assert (device.status.stats.cue, host.status.stats.cue) == ("luma", "vectors+luma")
    assert sum(frame.tokens for frame in device.frames) < 0.5 * sum(frame.grid.tokens for frame in device.frames)
    health, reference = device.status.picture, host.status.picture
    assert health.pts == reference.pts
    for name in ("changed", "still_s", "luma", "spread", "strangeness"):
        assert getattr(health, name) == pytest.approx(getattr(reference, name), rel=0.02, abs=0.01)
    shown = device.latest.render(), host.latest.render()
    assert (shown[0].width, shown[0].height, shown[0].pts) == (shown[1].width, shown[1].height, shown[1].pts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_asking_for_a_gpu_that_is_not_there_falls_back_and_says_so(clip, caplog):
    """Nothing here is made up: the process's own probe fails."""
    run = Run(FileSource(clip), PipelineSettings(decode="cuda"))
    assert run.status.decode == "cpu"
    assert len(run.frames) == 12
    reason = "decodes on the CPU: this machine has no NVIDIA driver (libcuda.so.1)"
    assert {status.reason for status in run.running} == {reason}
    assert caplog.messages == [f"camera gate {reason}"]
    assert shared_nvdec().sessions == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_believed_gpu_that_cannot_be_opened_is_named(clip, caplog):
    nvdec = Nvdec(lambda: None)
    run = Run(FileSource(clip), PipelineSettings(decode="auto"), nvdec)
    assert len(run.frames) == 12
    assert caplog.messages == ["camera gate decodes on the CPU: this machine has no NVIDIA driver (libcuda.so.1)"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_auto_says_nothing_on_a_machine_without_a_gpu(clip, caplog):
    run = Run(FileSource(clip), PipelineSettings(decode="auto"))
    assert run.status.decode == "cpu"
    assert {status.reason for status in run.running} == {""}
    assert caplog.messages == []


def test_memory_exhausted_on_the_gpu_costs_the_camera_its_device_and_no_more(clip, caplog, monkeypatch):
    """In mid-stream: it goes on from its next keyframe, as after a gap."""
    from cluster.decoder.gpu import frontend as module

    scale = module.scale_planes
    calls = []

    def short(*arguments):
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")
        return scale(*arguments)

    monkeypatch.setattr(module, "scale_planes", short)
    nvdec = host_nvdec()
    run = Run(FileSource(clip), PipelineSettings(decode="cuda"), nvdec)
    assert run.status.state is CameraState.ENDED
    assert run.status.decode == "cpu"
    assert nvdec.sessions == 0
    reason = "decodes on the CPU: the GPU failed: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert run.running[-1].reason == reason
    assert caplog.messages == [f"camera gate {reason}"]
    gaps = [frame for frame in run.frames if frame.gap]
    assert len(gaps) == 1
    assert gaps[0].complete
    assert run.status.samples_dropped == 1
    assert [frame.index for frame in run.frames] == list(range(len(run.frames)))


def test_an_error_of_cuda_ends_the_gpu_for_every_camera_of_the_process(clip, monkeypatch):
    from cluster.decoder.gpu import frontend as module

    def broken(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module, "scale_planes", broken)
    nvdec = host_nvdec()
    first = Run(FileSource(clip), PipelineSettings(decode="cuda"), nvdec)
    assert "illegal memory access" in first.running[0].reason
    second = Run(FileSource(clip), PipelineSettings(decode="cuda"), nvdec)
    assert len(second.frames) == 12
    assert "illegal memory access" in second.running[0].reason


def test_a_camera_that_reconnects_tries_the_gpu_again(clip):
    """Pushed twice: taken sessions the first time, a free one the second."""
    nvdec = host_nvdec()
    nvdec.limit = 0
    nvdec._limited_s = nvdec._clock()
    source, file = PushSource(max_packets=1000), FileSource(clip)
    source.begin_session(file.open(), "agent-1")
    for packet in file.packets():
        assert source.offer([packet]) == 0
    source.end_session()
    first = Run(source, PipelineSettings(decode="cuda"), nvdec)
    assert first.running[0].reason == "decodes on the CPU: all 0 NVDEC sessions of this process are taken"
    nvdec.limit = None
    again = Run(FileSource(clip), PipelineSettings(decode="cuda"), nvdec)
    assert (again.status.decode, len(again.frames)) == ("cuda", 12)


def test_the_ladder_and_keyframes_only_work_on_the_gpu(clip):
    def lower(run: Run) -> None:
        if len(run.frames) == 1:
            run.pipeline.set_quality(prune=3.0, fps=0.5)
        if len(run.frames) == 3:
            run.pipeline.set_keyframes_only(True)

    run = Run(FileSource(clip), PipelineSettings(decode="cuda"), host_nvdec(), lower)
    assert [frame.duration for frame in run.frames[:3]] == [1_000_000, 2_000_000, 2_000_000]
    assert run.status.state is CameraState.ENDED
    # A keyframe is a frame of its own, with its picture twice.
    alone = run.frames[3:]
    assert len(alone) == 1
    assert all(frame.complete for frame in alone)
    assert all(np.array_equal(frame.patches[:, 0], frame.patches[:, 1]) for frame in alone)


@pytest.mark.parametrize(
    ("cluster", "camera", "wanted"),
    [({}, {}, "auto"), ({"decode": "cuda"}, {}, "cuda"), ({"decode": "cuda"}, {"decode": "cpu"}, "cpu")],
)
def test_a_cameras_device_is_its_own_or_the_decoders(cluster, camera, wanted):
    question = {"id": "fire", "text": "Is there a fire?"}
    config = SightlineConfig(cluster=cluster, questions=[question])
    settings = camera_settings(config, CameraEntry(name="gate", **camera))
    assert settings.decode == wanted
    assert pipeline_settings(settings).decode == wanted
