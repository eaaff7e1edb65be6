"""Slice headers of H.264 and HEVC: type, QP and temporal layer of a coded picture.

Parses a packet's first slice header without decoding (ITU-T H.264 §7.3.2.2, §7.3.3; H.265 in
:mod:`cluster.codec.hevc_slice`), up to the slice QP near its end.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from cluster.codec.hevc_slice import read_hevc_picture, read_hevc_sequence, read_hevc_slice
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
    PictureType,
    read_h264_sequence,
    read_reference_counts,
    typed_units,
    unit_kind,
)

_HEADER_BYTES = 256
"""Bytes read of a slice header: enough for the weights of 32 references."""
_SETS_BYTES = 2048


class SliceHeaders:
    """Parses the packets of one stream in decoding order, tracking in-band parameter sets.

    A parameter set replaces the last one of its id; a damaged one invalidates all of its kind.
    """

    def __init__(self, codec: str, parameter_sets: bytes = b"") -> None:
        self._codec = codec
        self._sequences: dict[int, Any] = {}
        self._pictures: dict[int, Any] = {}
        self.read(parameter_sets)

    def read(self, data: bytes) -> CodedPicture | None:
        """The first coded picture of an Annex-B packet; None if its slice header or parameter sets are unreadable."""
        syntax = _SYNTAX.get(self._codec)
        if syntax is None:
            return None
        for kind, start in typed_units(self._codec, data):
            if kind == syntax.sps:
                _store(self._sequences, syntax.read_sequence, data[start : start + _SETS_BYTES])
            elif kind == syntax.pps:
                _store(self._pictures, syntax.read_picture, data[start : start + _SETS_BYTES])
            elif kind in syntax.slices:
                try:
                    return syntax.read_slice(data[start : start + _HEADER_BYTES], self._sequences, self._pictures)
                except (ValueError, KeyError, IndexError):
                    return None
        return None


def _store(known: dict[int, Any], read: Callable[[bytes], Any], unit: bytes) -> None:
    try:
        found = read(unit)
    except ValueError:
        known.clear()
    else:
        known[found.number] = found


@dataclass(frozen=True, slots=True)
class H264Picture:
    """Fields of a picture parameter set (§7.3.2.2) that slice headers depend on."""

    number: int
    sequence: int
    cabac: bool
    order_present: bool
    references: tuple[int, int]
    weighted: bool
    weighted_b: int
    qp: int
    redundant: bool


def read_h264_picture(unit: bytes) -> H264Picture:
    """Parse a picture parameter set. Raises ValueError if truncated, or with slice groups."""
    bits = Bits(unit[1:])
    number, sequence = bits.ue(), bits.ue()
    cabac, order_present = bits.flag(), bits.flag()
    if bits.ue():
        raise ValueError("slice groups are not supported")
    references = bits.ue() + 1, bits.ue() + 1
    weighted, weighted_b = bits.flag(), bits.bits(2)
    qp = 26 + bits.se()
    bits.skip_ue(2)
    bits.bits(2)
    redundant = bits.flag()
    return H264Picture(number, sequence, cabac, order_present, references, weighted, weighted_b, qp, redundant)


def read_h264_slice(unit: bytes, sequences: dict[int, H264Sequence], pictures: dict[int, H264Picture]) -> CodedPicture:
    """Parse a slice header. Raises ``ValueError`` if truncated or damaged, ``KeyError`` for unknown parameter sets."""
    bits = Bits(unit[1:])
    idr, reference = unit_kind("h264", unit[0]) == H264_IDR, bool(unit[0] & 0x60)
    bits.ue()
    # SP and SI slices (Extended profile) are treated as P and I.
    kind: PictureType = ("P", "B", "I", "P", "I")[bits.ue() % 5]
    picture = pictures[bits.ue()]
    sequence = sequences[picture.sequence]
    if sequence.colour_planes:
        bits.bits(2)
    bits.bits(sequence.frame_num_bits)
    field = not sequence.frames_only and bits.flag()
    if field:
        bits.bits(1)
    if idr:
        bits.ue()
    if sequence.order_type == 0 or sequence.order_deltas:
        if sequence.order_type == 0:
            bits.bits(sequence.order_bits)
        else:
            bits.se()
        if picture.order_present and not field:
            bits.se()
    if picture.redundant:
        bits.ue()
    if kind == "B":
        bits.bits(1)
    counts = read_reference_counts(bits, kind, picture.references)
    for _ in counts:
        # ref_pic_list_modification
        if bits.flag():
            while bits.ue() != 3:
                bits.ue()
    if (picture.weighted and kind == "P") or (picture.weighted_b == 1 and kind == "B"):
        _skip_h264_weights(bits, counts, chroma=bool(sequence.chroma) and not sequence.colour_planes)
    if reference:
        _skip_h264_marking(bits, idr)
    if picture.cabac and kind != "I":
        bits.ue()
    return CodedPicture(kind, picture.qp + bits.se(), reference)


def _skip_h264_weights(bits: Bits, counts: list[int], *, chroma: bool) -> None:
    bits.ue()
    if chroma:
        bits.ue()
    for count in counts:
        for _ in range(count):
            if bits.flag():
                bits.skip_ue(2)
            if chroma and bits.flag():
                bits.skip_ue(4)


def _skip_h264_marking(bits: Bits, idr: bool) -> None:
    if idr:
        bits.bits(2)
    elif bits.flag():
        while operation := bits.ue():
            bits.skip_ue(2 if operation == 3 else 0 if operation == 5 else 1)


@dataclass(frozen=True, slots=True)
class _Syntax:
    """NAL unit types of a codec, and their parsers."""

    sps: int
    pps: int
    slices: Container[int]
    read_sequence: Callable[[bytes], Any]
    read_picture: Callable[[bytes], Any]
    read_slice: Callable[[bytes, dict[int, Any], dict[int, Any]], CodedPicture]


_SYNTAX = {
    "h264": _Syntax(H264_SPS, H264_PPS, (H264_SLICE, H264_IDR), read_h264_sequence, read_h264_picture, read_h264_slice),
    "hevc": _Syntax(HEVC_SPS, HEVC_PPS, range(HEVC_VPS), read_hevc_sequence, read_hevc_picture, read_hevc_slice),
}
