"""Decoding on an NVIDIA GPU (NVDEC) through PyAV: this process's sessions, and their assignment to cameras.

Pictures stay on the device, where :mod:`cluster.decoder.gpu` processes them. Gaps, anchors and resynchronisation depend
on bitstream headers only and work as on the CPU; there are no motion vectors.
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
"""Surfaces a session has beyond the stream's references, for sampled pictures."""

RETRY_S = 600.0
"""Seconds until a learned session limit is retried: memory may have run short, not sessions."""

_NO_DEVICE = 100

Kind = tuple[str, int, int, int]
DecodeWish = Literal["auto", "cuda", "cpu"]


class NvdecError(Exception):
    """NVDEC cannot decode this stream. ``absent``: this machine has no GPU at all."""

    def __init__(self, reason: str, *, absent: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent


@dataclass(frozen=True, slots=True)
class DevicePicture(PictureHeader):
    """A sampled picture on the GPU, at the camera's resolution.

    ``frame``: a surface of ``codec``'s decoder; release it soon. ``masked`` ``[height, width]``: pixels under privacy
    masks, not applied yet. ``outlines``: zone outlines, not drawn yet.
    """

    frame: VideoFrame
    codec: str
    masked: BoolGrid | None = field(default=None, kw_only=True)
    outlines: Outlines | None = field(default=None, kw_only=True)


class NvdecDecoder(Decoder):
    """A decoder that holds a session of ``nvdec`` until it is freed. Pictures stay on the GPU."""

    device = "cuda"
    options = {"extra_hw_frames": str(SPARE_SURFACES)}  # noqa: RUF012

    def __init__(self, nvdec: Nvdec, codec: str, extradata: bytes, decoded_bytes: int, size: tuple[int, int]) -> None:
        """Raises ``NvdecError`` if no session is available; ``SourceError`` as Decoder does."""
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
        """Codec, width, height and bit depth: what decides whether a GPU can decode a stream."""
        sequence: Sequence | None = self._sequence
        width, height = self._size if sequence is None else (sequence.width, sequence.height)
        return self.codec, width, height, 8 if sequence is None else sequence.depth

    def _create(self, codec: str) -> CodecContext:
        # Make FFmpeg use the current context: it refuses the primary context that torch has already created.
        found: dict[str, object] = {"primary_ctx": "0", "current_ctx": "1"}
        accelerator = HWAccel("cuda", allow_software_fallback=False, options=found, is_hw_owned=True)
        with primary_context():
            try:
                # FFmpeg's native decoders drive NVDEC, for AV1 too.
                return CodecContext.create(codec, "r", hwaccel=accelerator)
            except av.FFmpegError as error:
                raise NvdecError(f"FFmpeg cannot open the GPU ({error.strerror})") from None

    def _choose_threads(self) -> None:
        """No CPU threads: the GPU decodes."""

    def _run(self, packet: av.Packet | None) -> list[VideoFrame]:  # type: ignore[type-arg]
        frames = super()._run(packet)
        if frames and not self.proven and self._nvdec is not None:
            self.proven = True
            self._nvdec.prove(self.kind)
        return frames


class Nvdec:
    """NVDEC in this process: availability and the number of sessions. Thread-safe.

    No API reports how many sessions a card has, and memory may limit them further, so the limit is learned: if a stream
    of a kind decoded before is refused, the number of other open sessions is the limit.
    """

    def __init__(
        self,
        probe: Callable[[], None] | None = None,
        decoder: Callable[[Nvdec, str, bytes, int, tuple[int, int]], NvdecDecoder] = NvdecDecoder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``probe`` raises NvdecError if there is no NVDEC; it is called once."""
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
        """Raise NvdecError if this machine has no NVDEC, or it has failed."""
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
        """Create a decoder of ``codec`` with a session; arguments as for Decoder. Raises NvdecError with the reason if
        there is none."""
        self.check()
        if not _knows(codec):
            raise NvdecError(f"NVDEC does not decode {codec}")
        return self._decoder(self, codec, extradata, decoded_bytes, size)

    def take_session(self) -> None:
        """Reserve a session. Raises NvdecError if all are taken."""
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
        """Record that NVDEC decodes streams of this kind."""
        with self._lock:
            self._proven.add(kind)

    def refuse(self, kind: Kind) -> str:
        """Explain why a decoder's first picture of an intact stream failed; learns the session limit if that is why."""
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
        """Stop using the GPU in this process, as after a CUDA error."""
        with self._lock:
            self._failure = NvdecError(reason)
            self._probed = True


@functools.cache
def shared_nvdec() -> Nvdec:
    """This process's instance."""
    return Nvdec()


@contextlib.contextmanager
def primary_context() -> Iterator[None]:
    """Make the first GPU's primary context, which torch uses, current in this thread. Raises NvdecError if the driver
    provides none."""
    cuda, context = _retained_context()
    cuda.cuCtxPushCurrent_v2(context)
    try:
        yield
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _retained_context() -> tuple[Any, ctypes.c_void_p]:
    """The driver library and the primary context, retained until the process ends."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise NvdecError("this machine has no NVIDIA driver (libcuda.so.1)") from None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    status = cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status:
        raise NvdecError(f"the NVIDIA driver provides no context (error {status})")
    return cuda, context


def _knows(codec: str) -> bool:
    try:
        return any(
            each.format is not None and each.format.name == "cuda" for each in Codec(codec, "r").hardware_configs
        )
    except ValueError:
        return False


def probe_machine(load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Check driver, GPU, NVDEC library and torch, in this order. ``load`` opens a shared library. Raises NvdecError
    naming what is missing."""
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
    try:
        # Imported only with a GPU present: decoding on the CPU does not need torch.
        import torch
    except ImportError:
        raise NvdecError("torch is not installed") from None
    if torch.version.cuda is None:
        raise NvdecError("this build of torch has no CUDA")
    major, minor = (int(part) for part in torch.version.cuda.split(".")[:2])
    # A driver runs programs built for any CUDA release of the same major version.
    if version.value // 1000 < major:
        raise NvdecError(
            f"the NVIDIA driver is too old: it supports CUDA {version.value // 1000}.{version.value % 1000 // 10}, "
            f"and torch needs {major}.{minor}"
        )
    if not torch.cuda.is_available():
        raise NvdecError("torch finds no GPU")


class DecodeDevice:
    """Creates the decoders of one camera, with an NVDEC session or on the CPU; used from the camera's thread.

    * ``name``: "cuda" or "cpu", empty before the first decoder
    * ``fallback``: why the GPU is not used; empty if "cpu" was requested, and for "auto" on a machine without a GPU

    After the GPU has refused the stream, it is decoded on the CPU until :meth:`reset`.
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
        """Create decoders on the CPU from now on."""
        self._refused, self.fallback = True, reason

    def make_decoder(self, header: StreamHeader, size: tuple[int, int]) -> Decoder:
        """Create the next decoder. Raises SourceError if this FFmpeg build cannot decode the codec."""
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
        """Decode on the CPU a GPU decoder's first packet, which it refused; None if the packet is damaged."""
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
