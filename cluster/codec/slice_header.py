"""Slice headers of H.264 and HEVC (ITU-T H.264 §7.3.3, H.265 §7.3.6): type, quantiser and layer of a coded picture.

Read from a packet's first slice without decoding. The whole header has to be walked, since the quantiser is near its
end; what lies behind it is not read.
"""

from cluster.codec.h264_slice import H264Picture, read_h264_picture, read_h264_slice
from cluster.codec.hevc_slice import HevcPicture, HevcSequence, read_hevc_picture, read_hevc_sequence, read_hevc_slice
from cluster.codec.nal import (
    H264_IDR,
    H264_PPS,
    H264_SLICE,
    H264_SPS,
    HEVC_PPS,
    HEVC_SPS,
    HEVC_VPS,
    Bits,
    CodedPicture,
    H264Sequence,
    read_h264_sequence,
    unit_kind,
    unit_starts,
)

_HEADER_BYTES = 256
"""Most bytes of a slice header that are read: weights of 32 references fit."""
_SETS_BYTES = 2048


class SliceHeaders:
    """Reads the packets of one stream in decoding order, and the parameter sets among them.

    A packet without a readable first slice, or with unknown parameter sets, gives None. Every parameter set replaces
    the last one of its number; a damaged one removes it.
    """

    def __init__(self, codec: str, parameter_sets: bytes = b"") -> None:
        self._codec = codec
        self._h264: dict[int, H264Sequence] = {}
        self._h264_pictures: dict[int, H264Picture] = {}
        self._hevc: dict[int, HevcSequence] = {}
        self._hevc_pictures: dict[int, HevcPicture] = {}
        self.read(parameter_sets)

    def read(self, data: bytes) -> CodedPicture | None:
        """The first coded picture of an Annex-B packet."""
        if self._codec == "h264":
            return self._read_h264(data)
        return self._read_hevc(data) if self._codec == "hevc" else None

    def _read_h264(self, data: bytes) -> CodedPicture | None:
        for start in unit_starts(data):
            kind = unit_kind("h264", data[start])
            if kind in (H264_SPS, H264_PPS):
                self._keep_h264_set(kind, data[start + 1 : start + _SETS_BYTES])
            elif kind in (H264_SLICE, H264_IDR):
                try:
                    payload = data[start + 1 : start + _HEADER_BYTES]
                    return read_h264_slice(payload, data[start], self._h264, self._h264_pictures)
                except (ValueError, KeyError):
                    return None
        return None

    def _keep_h264_set(self, kind: int, payload: bytes) -> None:
        try:
            if kind == H264_SPS:
                bits = Bits(payload)
                bits.bits(24)
                self._h264[bits.ue()] = read_h264_sequence(payload)
            else:
                number, picture = read_h264_picture(Bits(payload))
                self._h264_pictures[number] = picture
        except ValueError:
            (self._h264 if kind == H264_SPS else self._h264_pictures).clear()

    def _read_hevc(self, data: bytes) -> CodedPicture | None:
        for start in unit_starts(data):
            kind = unit_kind("hevc", data[start])
            if kind in (HEVC_SPS, HEVC_PPS):
                self._keep_hevc_set(kind, data[start + 2 : start + _SETS_BYTES])
            elif kind < HEVC_VPS:
                try:
                    layer = (data[start + 1] & 7) - 1
                    payload = data[start + 2 : start + _HEADER_BYTES]
                    return read_hevc_slice(payload, kind, layer, self._hevc, self._hevc_pictures)
                except (ValueError, KeyError, IndexError):
                    return None
        return None

    def _keep_hevc_set(self, kind: int, payload: bytes) -> None:
        try:
            if kind == HEVC_SPS:
                number, sequence = read_hevc_sequence(Bits(payload))
                self._hevc[number] = sequence
            else:
                number, picture = read_hevc_picture(Bits(payload))
                self._hevc_pictures[number] = picture
        except ValueError:
            (self._hevc if kind == HEVC_SPS else self._hevc_pictures).clear()
