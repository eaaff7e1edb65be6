"""Decoding on a GPU where there is none: each reason why is named, and learnt limits are kept.

NVDEC itself cannot run here. What stands for it decodes on the CPU and fails where NVDEC would.
"""

import ctypes
import gc
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from cluster.codec import FileSource
from cluster.codec import nvdec as nvdec_module
from cluster.codec.decoder import DecodeError
from cluster.codec.lazy_processor import LazyProcessor
from cluster.codec.nvdec import RETRY_S, Nvdec, NvdecDecoder, NvdecError, probe_machine
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.lab.bench.gpu_frontend import HostNvdecDecoder, host_nvdec
from cluster.types import PatchGeometry

QWEN = PatchGeometry(patch=14, merge=2, temporal=2)

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


class Driver:
    """libcuda as far as it is asked."""

    def __init__(self, status: int = 0, version: int = 13000) -> None:
        self.status, self.version = status, version

    def cuInit(self, _flags: int) -> int:
        return self.status

    def cuDriverGetVersion(self, into) -> int:
        ctypes.cast(into, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return 0


def libraries(driver: Driver, *, nvdec: bool = True):
    def load(name: str):
        if name == "libnvcuvid.so.1" and not nvdec:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    return load


@needs_no_gpu
def test_this_machine_has_no_driver():
    """The real probe of a machine without a GPU."""
    with pytest.raises(NvdecError, match=r"no NVIDIA driver \(libcuda.so.1\)") as caught:
        probe_machine()
    assert caught.value.absent


@needs_no_gpu
def test_ffmpeg_opens_the_gpu_in_torch_s_context(monkeypatch):
    """The real adapter: FFmpeg finds no driver of its own here, and the thread's context is as it was."""
    calls = []

    class Contexts:
        def __getattr__(self, name: str):
            return lambda *_: calls.append(name) or 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Contexts())
    nvdec_module._retained_context.cache_clear()
    try:
        with pytest.raises(NvdecError, match=r"FFmpeg cannot open the GPU \(Operation not permitted\)"):
            Nvdec(lambda: None).open("h264", b"")
    finally:
        nvdec_module._retained_context.cache_clear()
    assert calls == ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"]


@needs_no_gpu
def test_a_decoder_needs_a_gpu_whatever_the_probe_said():
    """The real adapter, with a probe that believes in a GPU."""
    nvdec = Nvdec(lambda: None)
    with pytest.raises(NvdecError, match=r"this machine has no NVIDIA driver \(libcuda.so.1\)"):
        nvdec.open("h264", b"")
    gc.collect()
    assert nvdec.sessions == 0


@pytest.mark.parametrize(
    ("load", "cuda", "reason", "absent"),
    [
        (libraries(Driver(status=100)), "13.0", "the NVIDIA driver finds no GPU", True),
        (libraries(Driver(status=803)), "13.0", r"does not start \(cuInit: error 803\)", False),
        (libraries(Driver(), nvdec=False), "13.0", r"no NVDEC library \(libnvcuvid.so.1\)", False),
        (libraries(Driver(version=11040)), "13.0", "too old: it supports CUDA 11.4, and torch needs 13.0", False),
        (libraries(Driver()), None, "this build of torch has no CUDA", False),
    ],
)
def test_what_is_missing_is_named(monkeypatch, load, cuda, reason, absent):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(NvdecError, match=reason) as caught:
        probe_machine(load)
    assert caught.value.absent is absent


@needs_no_gpu
def test_a_driver_without_a_gpu_for_torch_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(NvdecError, match="torch finds no GPU"):
        probe_machine(libraries(Driver()))


def test_a_machine_without_torch_decodes_on_the_cpu(monkeypatch):
    """Its first camera failed with an internal error."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NvdecError, match="torch is not installed"):
        probe_machine(libraries(Driver()))


def test_the_machine_is_probed_once():
    asked = []

    def probe():
        asked.append(1)
        raise NvdecError("no driver", absent=True)

    nvdec = Nvdec(probe)
    for _ in range(3):
        with pytest.raises(NvdecError, match="no driver") as caught:
            nvdec.open("h264", b"")
        assert caught.value.absent
    assert asked == [1]


@pytest.mark.parametrize("codec", ["theora", "ffv1", "no-such-codec"])
def test_a_codec_that_nvdec_does_not_know_is_named(codec):
    with pytest.raises(NvdecError, match=f"NVDEC does not decode {codec}"):
        host_nvdec().open(codec, b"")


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1", "vp9"])
def test_codecs_of_cameras_are_known(codec):
    assert isinstance(host_nvdec().open(codec, b""), NvdecDecoder)


class Taken(HostNvdecDecoder):
    """A GPU of two sessions: FFmpeg makes any number of decoders, and the third's first packet fails."""

    def decode(self, data, pts, dts, **options):
        if self._nvdec.sessions > 2 and not self.proven:
            raise DecodeError("Invalid data found when processing input")
        return super().decode(data, pts, dts, **options)


def feed(processor: CodecProcessor, source: FileSource, packets: int = 40) -> int:
    """Feed the beginning of a clip; returns how many samples came of it."""
    processor.open(source.open())
    found = 0
    for _, packet in zip(range(packets), source.packets(), strict=False):
        found += len(processor.feed(packet)) + len(processor.pop_device_pictures())
    return found


def processor(nvdec: Nvdec, decode: str = "cuda") -> CodecProcessor:
    return CodecProcessor(QWEN, CodecOptions(decode=decode), nvdec)


@pytest.fixture
def clip(tmp_path):
    return write_clip(tmp_path / "clip.mp4")


def write_clip(path, *, size=(320, 180), encoder="libx264", form="yuv420p"):
    random = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, rate=10, options={"preset": "ultrafast", "bf": "0", "g": "20"})
        stream.width, stream.height, stream.pix_fmt = *size, form
        for index in range(60):
            frame = av.VideoFrame.from_ndarray(random.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8), "rgb24")
            frame.pts, frame.time_base = index, Fraction(1, 10)
            container.mux(stream.encode(frame.reformat(format=form)))
        container.mux(stream.encode())
    return path


def test_taken_sessions_are_learnt_and_given_back(clip):
    seconds = [0.0]
    nvdec = Nvdec(lambda: None, Taken, lambda: seconds[0])
    first, second, third, fourth = (processor(nvdec) for _ in range(4))
    assert feed(first, FileSource(clip)) == feed(second, FileSource(clip)) > 0
    assert (first.device.name, first.device.fallback, nvdec.limit) == ("cuda", "", None)
    # The refused packet is the keyframe, and the CPU decodes it: nothing is lost.
    assert feed(third, FileSource(clip)) == 8
    assert (third.device.name, third.device.fallback) == ("cpu", "all 2 NVDEC sessions of this process are taken")
    assert third.stats.decode_errors == 0
    assert (nvdec.sessions, nvdec.limit) == (2, 2)
    # The next one does not even try.
    assert feed(fourth, FileSource(clip)) == 8
    assert (fourth.device.name, fourth.device.fallback) == ("cpu", "all 2 NVDEC sessions of this process are taken")
    # A camera that goes makes room for one that opens again.
    del first
    gc.collect()
    assert nvdec.sessions == 1
    assert feed(third, FileSource(clip)) == 8
    assert (third.device.name, third.device.fallback, nvdec.sessions) == ("cuda", "", 2)
    seconds[0] = RETRY_S + 1
    nvdec.take_session()
    assert (nvdec.sessions, nvdec.limit) == (3, None)


def test_a_stream_of_a_kind_never_decoded_is_no_sign_of_a_limit(clip, tmp_path):
    """It is refused for what it is, or for sessions: nobody knows, and both are said."""
    nvdec = Nvdec(lambda: None, Taken)
    first, second, other = (processor(nvdec) for _ in range(3))
    feed(first, FileSource(clip))
    feed(second, FileSource(clip))
    assert feed(other, FileSource(write_clip(tmp_path / "other.mp4", size=(352, 288)))) == 8
    assert other.device.fallback == (
        "NVDEC refuses h264 of 352 x 288 in 8 bits: this GPU cannot decode it, or gives no more than 2 sessions"
    )
    assert nvdec.limit is None
    # The only camera of a process learns no limit at all. Sizes are those of the bitstream.
    alone = Nvdec(lambda: None, Refusing)
    lonely = processor(alone)
    assert feed(lonely, FileSource(clip)) == 8
    assert (lonely.device.fallback, alone.limit) == ("NVDEC refuses h264 of 320 x 192 in 8 bits", None)


class Refusing(HostNvdecDecoder):
    """A GPU that decodes nothing."""

    def decode(self, data, pts, dts, **options):
        raise DecodeError("Invalid data found when processing input")


def test_damage_is_not_taken_for_a_refusal(clip):
    """A first packet that the CPU cannot decode either leaves the camera on the GPU."""
    source = FileSource(clip)
    nvdec = host_nvdec()
    damaged = processor(nvdec)
    damaged.open(source.open())
    packets = list(source.packets())
    broken = packets[0].__class__("h264", b"\0\0\0\1\x65" + bytes(50), 0, 0, True, 0)
    assert damaged.feed(broken) == []
    for packet in packets[20:40]:
        damaged.feed(packet.__class__("h264", packet.data, packet.pts, packet.dts, packet.keyframe, packet.sequence))
    assert (damaged.device.name, damaged.device.fallback) == ("cuda", "")
    assert damaged.stats.frames_decoded == 20
    assert nvdec.sessions == 1


def test_samples_on_the_gpu_are_those_of_the_cpu(clip):
    """Anchors, times, gaps: the same headers whoever decodes; the cue is luma."""
    told = {}
    for decode in ("cpu", "cuda"):
        one, source = processor(host_nvdec(), decode), FileSource(clip)
        one.open(source.open())
        found = []
        for packet in source.packets():
            if not 25 <= packet.sequence < 30:
                found += one.feed(packet) + one.pop_device_pictures()
        found += one.drain() + one.pop_device_pictures()
        told[decode] = [(each.index, each.pts, each.anchor, each.fresh, each.gap, each.grid) for each in found]
        assert one.stats.frames_sampled == len(found)
        assert one.stats.gaps == 1
        assert one.stats.cue == ("luma" if decode == "cuda" else "vectors+luma")
    assert told["cpu"] == told["cuda"]
    assert len(told["cuda"]) > 8


def test_no_picture_stays_on_the_gpu_once_it_was_taken(clip):
    """It is one of a decoder's few surfaces. Lazy decoding keeps its newest picture, and is the CPU's."""

    def pictures() -> int:
        gc.collect()
        return sum(isinstance(each, av.VideoFrame) and each.width > 0 for each in gc.get_objects())

    before = pictures()
    one = LazyProcessor(QWEN, lambda _: True, CodecOptions(decode="cuda"), host_nvdec())
    assert feed(one, FileSource(clip)) > 0
    assert one.device.name == "cuda"
    assert pictures() == before


def test_a_camera_asked_onto_the_cpu_never_probes():
    def probe():
        raise AssertionError("nobody asked")

    one = CodecProcessor(QWEN, CodecOptions(decode="cpu"), Nvdec(probe))
    assert one.device.fallback == ""


@pytest.mark.parametrize(("decode", "fallback"), [("auto", ""), ("cuda", "no driver")])
def test_auto_is_quiet_where_there_is_no_gpu(clip, decode, fallback):
    def probe():
        raise NvdecError("no driver", absent=True)

    one = processor(Nvdec(probe), decode)
    assert feed(one, FileSource(clip)) == 8
    assert (one.device.name, one.device.fallback) == ("cpu", fallback)


def test_auto_says_what_is_wrong_with_a_gpu(clip):
    def probe():
        raise NvdecError("the driver has no NVDEC library")

    one = processor(Nvdec(probe), "auto")
    feed(one, FileSource(clip))
    assert one.device.fallback == "the driver has no NVDEC library"
