"""Decoding on an NVIDIA GPU (NVDEC) through PyAV: the sessions of this process, and which cameras have one.

Pictures stay on the device, where :mod:`cluster.decoder.gpu` works on them. Only the bitstream's own headers are read
here, so that gaps, anchors and resynchronisation are the CPU decoder's; there are no motion vectors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import av
from av.codec.codec import Codec
from av.codec.context import CodecContext
from av.codec.hwaccel import HWAccel
from av.video.frame import VideoFrame

from cluster.codec.decoder import DECODED_BYTES, DecodeError, Decoder, PicturesTooLargeError
from cluster.codec.nal import Sequence
from cluster.codec.picture import Outlines
from cluster.codec.source import StreamHeader
from cluster.types import BoolGrid, EncodedPacket, PictureHeader

SPARE_SURFACES = 4
"""Pictures that a session holds beyond what its stream refers to: the ones that are sampled."""

RETRY_S = 600.0
"""A session limit that was met is believed for so long: memory may have been short, not sessions."""

_NO_DEVICE = 100

Kind = tuple[str, int, int, int]
DecodeWish = Literal["auto", "cuda", "cpu"]


class NvdecError(Exception):
    """NVDEC does not decode this stream. ``absent``: this machine has no GPU at all."""

    def __init__(self, reason: str, *, absent: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent


@dataclass(frozen=True, slots=True)
class DevicePicture(PictureHeader):
    """A sampled picture on the GPU, in the camera's own size.

    ``frame``: a surface of ``codec``'s decoder, to be let go soon. ``masked`` ``[height, width]``: its pixels under
    privacy masks, which nobody has painted yet. ``outlines``: of its zones, not drawn yet either.
    """

    frame: VideoFrame
    codec: str
    masked: BoolGrid | None = field(default=None, kw_only=True)
    outlines: Outlines | None = field(default=None, kw_only=True)


class NvdecDecoder(Decoder):
    """A decoder with a session of ``nvdec``, which it gives back when it goes. Pictures stay on the GPU."""

    device = "cuda"
    options = {"extra_hw_frames": str(SPARE_SURFACES)}  # noqa: RUF012

    def __init__(self, nvdec: Nvdec, codec: str, extradata: bytes, decoded_bytes: int, size: tuple[int, int]) -> None:
        """Raises NvdecError: no session. SourceError: see Decoder."""
        self._nvdec: Nvdec | None = None
        super().__init__(codec, extradata, decoded_bytes, size)
        nvdec.take_session()
        self._nvdec = nvdec
        self.proven = False

    def __del__(self) -> None:
        super().__del__()
        if self._nvdec is not None:
            self._nvdec.free_session()

    @property
    def kind(self) -> Kind:
        """What decides whether a GPU can decode a stream, as far as its headers tell."""
        sequence: Sequence | None = self._sequence
        width, height = self._size if sequence is None else (sequence.width, sequence.height)
        return self.codec, width, height, 8 if sequence is None else sequence.depth

    def _create(self, codec: str) -> CodecContext:
        # FFmpeg refuses torch's context, which the GPU has already, unless it is told to take what it finds.
        found: dict[str, object] = {"primary_ctx": "0", "current_ctx": "1"}
        accelerator = HWAccel("cuda", allow_software_fallback=False, options=found, is_hw_owned=True)
        with primary_context():
            try:
                # FFmpeg's own decoders drive NVDEC, also for AV1.
                return CodecContext.create(codec, "r", hwaccel=accelerator)
            except av.FFmpegError as error:
                raise NvdecError(f"FFmpeg cannot open the GPU ({error.strerror})") from None

    def _choose_threads(self) -> None:
        """The GPU has its own."""

    def _run(self, packet: av.Packet | None) -> list[VideoFrame]:  # type: ignore[type-arg]
        frames = super()._run(packet)
        if frames and not self.proven and self._nvdec is not None:
            self.proven = True
            self._nvdec.prove(self.kind)
        return frames


class Nvdec:
    """NVDEC as this process has it: whether it is there, and how many sessions it gives. Thread-safe.

    Nobody tells how many sessions a card has, and memory may end them earlier. The limit is learnt: where a stream is
    refused of a kind that was decoded before, as many sessions as were open are what there is.
    """

    def __init__(
        self,
        probe: Callable[[], None] | None = None,
        decoder: Callable[[Nvdec, str, bytes, int, tuple[int, int]], NvdecDecoder] = NvdecDecoder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``probe`` raises NvdecError where there is no NVDEC; it is asked once."""
        self._probe = probe or probe_machine
        self._decoder = decoder
        self._clock = clock
        self._lock = threading.Lock()
        self._failure: NvdecError | None = None
        self._probed = False
        self._proven: set[Kind] = set()
        self._limited_s = 0.0
        self.sessions = 0
        self.limit: int | None = None

    def check(self) -> None:
        """Raise NvdecError where this machine has no NVDEC, or has failed."""
        with self._lock:
            if not self._probed:
                self._probed = True
                try:
                    self._probe()
                except NvdecError as error:
                    self._failure = error
            if self._failure is not None:
                raise NvdecError(str(self._failure), absent=self._failure.absent)

    def open(
        self, codec: str, extradata: bytes, decoded_bytes: int = DECODED_BYTES, size: tuple[int, int] = (0, 0)
    ) -> NvdecDecoder:
        """A decoder of ``codec`` with a session; arguments are those of Decoder. Raises NvdecError: why there is
        none."""
        self.check()
        if not _knows(codec):
            raise NvdecError(f"NVDEC does not decode {codec}")
        return self._decoder(self, codec, extradata, decoded_bytes, size)

    def take_session(self) -> None:
        """Raises NvdecError: all are taken."""
        with self._lock:
            if self.limit is not None and self._clock() - self._limited_s > RETRY_S:
                self.limit = None
            if self.limit is not None and self.sessions >= self.limit:
                raise NvdecError(f"all {self.limit} NVDEC sessions of this process are taken")
            self.sessions += 1

    def free_session(self) -> None:
        with self._lock:
            self.sessions -= 1

    def prove(self, kind: Kind) -> None:
        """NVDEC has decoded a picture of such a stream."""
        with self._lock:
            self._proven.add(kind)

    def refuse(self, kind: Kind) -> str:
        """Why a decoder's first picture of a sound stream failed; learns the limit where that is the reason."""
        codec, width, height, depth = kind
        with self._lock:
            others = self.sessions - 1
            if kind in self._proven and others > 0:
                self.limit, self._limited_s = others, self._clock()
                return f"all {others} NVDEC sessions of this process are taken"
            shape = f"{codec} of {width} x {height} in {depth} bits"
            if others > 0:
                return f"NVDEC refuses {shape}: this GPU cannot decode it, or gives no more than {others} sessions"
            return f"NVDEC refuses {shape}"

    def fail(self, reason: str) -> None:
        """The GPU is of no more use to this process, as after an error of CUDA."""
        with self._lock:
            self._failure = NvdecError(reason)
            self._probed = True


@functools.cache
def shared_nvdec() -> Nvdec:
    """The one of this process."""
    return Nvdec()


@contextlib.contextmanager
def primary_context() -> Iterator[None]:
    """The context of the first GPU that torch works in is this thread's. Raises NvdecError: the driver, which was there
    before, gives none."""
    cuda, context = _retained_context()
    cuda.cuCtxPushCurrent_v2(context)
    try:
        yield
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _retained_context() -> tuple[Any, ctypes.c_void_p]:
    """The driver, and the context, which stays to the end of the process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise NvdecError("this machine has no NVIDIA driver (libcuda.so.1)") from None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    status = cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status:
        raise NvdecError(f"the NVIDIA driver gives no context (error {status})")
    return cuda, context


def _knows(codec: str) -> bool:
    try:
        return any(
            each.format is not None and each.format.name == "cuda" for each in Codec(codec, "r").hardware_configs
        )
    except ValueError:
        return False


def probe_machine(load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Check driver, GPU, NVDEC's library and torch, in this order. ``load`` opens a shared library. Raises NvdecError:
    names what is missing."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        raise NvdecError("this machine has no NVIDIA driver (libcuda.so.1)", absent=True) from None
    status = cuda.cuInit(0)
    if status == _NO_DEVICE:
        raise NvdecError("the NVIDIA driver finds no GPU", absent=True)
    if status:
        raise NvdecError(f"the NVIDIA driver does not start (cuInit: error {status})")
    try:
        load("libnvcuvid.so.1")
    except OSError:
        raise NvdecError(
            "the driver has no NVDEC library (libnvcuvid.so.1); a container needs "
            "NVIDIA_DRIVER_CAPABILITIES=compute,video"
        ) from None
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    # Imported where there is a GPU alone: a decoder on the CPU needs no torch.
    import torch

    if torch.version.cuda is None:
        raise NvdecError("this build of torch has no CUDA")
    major, minor = (int(part) for part in torch.version.cuda.split(".")[:2])
    # Drivers run what was built for any release of their own major one.
    if version.value // 1000 < major:
        raise NvdecError(
            f"the NVIDIA driver is too old: it supports CUDA {version.value // 1000}.{version.value % 1000 // 10}, "
            f"and torch needs {major}.{minor}"
        )
    if not torch.cuda.is_available():
        raise NvdecError("torch finds no GPU")


class DecodeDevice:
    """Makes the decoders of one camera, with a session of NVDEC or on the CPU; used by its thread.

    * ``name``: "cuda" or "cpu", empty before the first decoder
    * ``fallback``: why it is not the GPU; empty where the CPU was asked for, and for "auto" on a machine without a GPU

    Once the GPU has refused the stream, the CPU decodes it until :meth:`reset`.
    """

    def __init__(self, wish: DecodeWish, nvdec: Nvdec | None, decoded_bytes: int) -> None:
        self.name = self.fallback = ""
        self._wish = wish
        self._nvdec = nvdec if wish != "cpu" else None
        self._decoded_bytes = decoded_bytes
        self._refused = False

    def reset(self) -> None:
        """Try the GPU again with the next decoder."""
        self._refused = False

    def leave(self, reason: str) -> None:
        """Make decoders for the CPU from here on."""
        self._refused, self.fallback = True, reason

    def make_decoder(self, header: StreamHeader, size: tuple[int, int]) -> Decoder:
        """Raises SourceError: this FFmpeg cannot decode the codec."""
        arguments = header.codec, header.extradata, self._decoded_bytes, size
        if self._nvdec is not None and not self._refused:
            try:
                decoder = self._nvdec.open(*arguments)
            except NvdecError as error:
                self.leave("" if error.absent and self._wish == "auto" else str(error))
            else:
                self.name, self.fallback = decoder.device, ""
                return decoder
        self.name = Decoder.device
        return Decoder(*arguments)

    def decode_refused(
        self, refusing: Decoder | None, packet: EncodedPacket, data: bytes, header: StreamHeader
    ) -> tuple[Decoder, list[VideoFrame]] | None:
        """Decode on the CPU what was the first packet to a decoder on the GPU; None if the video is damaged instead."""
        if not isinstance(refusing, NvdecDecoder) or refusing.proven or self._nvdec is None:
            return None
        decoder = Decoder(header.codec, header.extradata, self._decoded_bytes, (header.width, header.height))
        try:
            frames = decoder.decode(data, packet.pts, packet.dts, discard=packet.discard)
        except (DecodeError, PicturesTooLargeError):
            return None
        self.leave(self._nvdec.refuse(refusing.kind))
        self.name = decoder.device
        return decoder, frames
