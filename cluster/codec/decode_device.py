"""Chooses where one camera's stream is decoded: a session of NVDEC, or the CPU with the reason why."""

from typing import Literal

from av.video.frame import VideoFrame

from cluster.codec.decoder import DecodeError, Decoder
from cluster.codec.nvdec import Nvdec, NvdecDecoder, NvdecError
from cluster.codec.picture_memory import PicturesTooLargeError
from cluster.codec.source import StreamHeader
from cluster.types import EncodedPacket

DecodeWish = Literal["auto", "cuda", "cpu"]


class DecodeDevice:
    """Makes the decoders of one camera; used by its thread.

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
            frames = decoder.decode(data, packet.pts, packet.dts)
        except (DecodeError, PicturesTooLargeError):
            return None
        self.leave(self._nvdec.refuse(refusing.kind))
        self.name = decoder.device
        return decoder, frames
