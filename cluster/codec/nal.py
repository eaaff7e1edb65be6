"""Minimal H.264 and HEVC bitstream parser (ITU-T H.264, H.265).

Covers framing (avcC/hvcC length prefixes to Annex-B start codes), random access points, memory demand from sequence
parameter sets, and H.264's ``frame_num``: the only trace of a lost reference picture, which FFmpeg conceals silently.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

START_CODE = b"\x00\x00\x00\x01"
_SHORT_START = b"\x00\x00\x01"

H264_SLICE, H264_IDR, H264_SEI, H264_SPS, H264_PPS = 1, 5, 6, 7, 8
HEVC_VPS, HEVC_SPS, HEVC_PPS = 32, 33, 34
_HEVC_IRAP, _HEVC_SEI = range(16, 24), (39, 40)
_RECOVERY_POINT = 6
_CHROMA_PROFILES = {44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 144, 244}

MOST_REFERENCES = 32
FRAMED_CODECS = frozenset({"h264", "hevc"})
PARAMETER_SETS = {"h264": (H264_SPS, H264_PPS), "hevc": (HEVC_VPS, HEVC_SPS, HEVC_PPS)}

PictureType = Literal["I", "P", "B"]


@dataclass(frozen=True, slots=True)
class CodedPicture:
    """``kind``: type of the first slice. ``qp``: its luma QP, 0..51 for 8 bits. ``reference``: whether later pictures
    of its layer may refer to it. ``layer``: temporal layer in HEVC, 0 in H.264."""

    kind: PictureType
    qp: int
    reference: bool
    layer: int = 0


@dataclass(frozen=True, slots=True)
class Configuration:
    """Decoder configuration: Annex-B parameter sets, and the framing of NAL units in packets.

    ``length_size``: bytes of each NAL unit's length prefix; 0 means start codes.
    """

    parameter_sets: bytes
    length_size: int


def configuration(codec: str, extradata: bytes) -> Configuration:
    """Parse avcC, hvcC or Annex-B extradata (ISO/IEC 14496-15 §5.3.3, §8.3.3). Raises ValueError if the record is
    truncated."""
    if codec not in FRAMED_CODECS or not extradata or extradata.startswith((_SHORT_START, START_CODE)):
        return Configuration(extradata, 0)
    try:
        if codec == "h264":
            units, length_size = list(_avcc_units(extradata)), (extradata[4] & 3) + 1
        else:
            units, length_size = list(_hvcc_units(extradata)), (extradata[21] & 3) + 1
    except IndexError:
        raise ValueError(f"the {codec} decoder configuration of {len(extradata)} bytes is truncated") from None
    return Configuration(b"".join(START_CODE + unit for unit in units), length_size)


def _avcc_units(record: bytes) -> Iterator[bytes]:
    at = 5
    for mask in (0x1F, 0xFF):
        count = record[at] & mask
        at += 1
        for _ in range(count):
            unit, at = _sized_unit(record, at)
            yield unit


def _hvcc_units(record: bytes) -> Iterator[bytes]:
    at = 23
    for _ in range(record[22]):
        count = record[at + 1] << 8 | record[at + 2]
        at += 3
        for _ in range(count):
            unit, at = _sized_unit(record, at)
            yield unit


def _sized_unit(record: bytes, at: int) -> tuple[bytes, int]:
    end = at + 2 + (record[at] << 8 | record[at + 1])
    if end > len(record):
        raise IndexError
    return record[at + 2 : end], end


def to_annexb(data: bytes, length_size: int) -> bytes:
    """Replace length prefixes by start codes. Raises ValueError if a length exceeds the packet."""
    units = []
    at = 0
    while at < len(data):
        start = at + length_size
        at = start + int.from_bytes(data[at:start], "big")
        if at > len(data) or start > len(data):
            raise ValueError("a NAL unit is longer than its packet")
        units.append(data[start:at])
    return START_CODE + START_CODE.join(units) if units else b""


def unit_starts(data: bytes) -> Iterator[int]:
    """Offsets of the first byte of each NAL unit of an Annex-B packet."""
    at = data.find(_SHORT_START)
    while 0 <= at < len(data) - 3:
        yield at + 3
        at = data.find(_SHORT_START, at + 3)


def typed_units(codec: str, data: bytes) -> Iterator[tuple[int, int]]:
    """``nal_unit_type`` and offset of the first byte of each NAL unit of an Annex-B packet."""
    return ((unit_kind(codec, data[start]), start) for start in unit_starts(data))


def unit_end(data: bytes, start: int) -> int:
    """Offset past the end of the NAL unit that contains ``start``, trailing zeros included."""
    end = data.find(_SHORT_START, start)
    return len(data) if end < 0 else end


def parameter_sets(codec: str, data: bytes) -> tuple[bytes, bytes]:
    """Sequence parameter sets, and all parameter sets, before the first picture of an Annex-B packet; both as Annex-B,
    empty without any."""
    # Deduplicated: some cameras and servers repeat them before a keyframe.
    sets: dict[bytes, int] = {}
    for kind, start in typed_units(codec, data):
        if is_picture(codec, kind):
            break
        if kind in PARAMETER_SETS[codec]:
            sets[START_CODE + data[start : unit_end(data, start)].rstrip(b"\0")] = kind
    return b"".join(unit for unit, kind in sets.items() if kind in (H264_SPS, HEVC_SPS)), b"".join(sets)


def without_hevc_sei(data: bytes) -> bytes:
    """An HEVC packet without its SEI, which no picture depends on. Some cameras send malformed SEI, and with error
    detection enabled FFmpeg rejects the whole packet."""
    units = list(typed_units("hevc", data))
    if not any(kind in _HEVC_SEI for kind, _ in units):
        return data
    return b"".join(START_CODE + data[start : unit_end(data, start)] for kind, start in units if kind not in _HEVC_SEI)


def picture_bytes(codec: str, data: bytes) -> int:
    """Bytes of an Annex-B packet's slices, without SEI, parameter sets and filler data."""
    slices = (start for kind, start in typed_units(codec, data) if is_picture(codec, kind))
    return sum(len(data[start : unit_end(data, start)].rstrip(b"\0")) for start in slices)


def starts_decoding(codec: str, data: bytes) -> bool:
    """Whether decoding can start at this Annex-B packet: IDR, H.264 recovery point, or HEVC IRAP picture. False for
    other codecs."""
    for kind, start in typed_units(codec, data) if codec in FRAMED_CODECS else ():
        if codec == "h264":
            if kind == H264_IDR or (kind == H264_SEI and _RECOVERY_POINT in _sei_types(data, start + 1)):
                return True
        elif kind in _HEVC_IRAP:
            return True
        if is_picture(codec, kind):
            return False
    return False


def unit_kind(codec: str, header: int) -> int:
    """``nal_unit_type`` from a NAL unit's first byte."""
    return header & 0x1F if codec == "h264" else header >> 1 & 0x3F


def is_picture(codec: str, kind: int) -> bool:
    """Whether a ``nal_unit_type`` is that of a coded slice."""
    return H264_SLICE <= kind <= H264_IDR if codec == "h264" else kind < HEVC_VPS


def _sei_types(data: bytes, at: int) -> list[int]:
    """Payload types of one SEI NAL unit (H.264 §7.3.2.3.1); emulation prevention bytes may end the walk early."""
    end = unit_end(data, at)
    types: list[int] = []
    while at + 1 < end and data[at] != 0x80:
        values = []
        for _ in range(2):
            value = 0
            while at < end and data[at] == 0xFF:
                value += 255
                at += 1
            if at >= end:
                return types
            values.append(value + data[at])
            at += 1
        types.append(values[0])
        at += values[1]
    return types


class Bits:
    """Bit reader over an RBSP."""

    def __init__(self, payload: bytes) -> None:
        raw = payload.replace(b"\x00\x00\x03", b"\x00\x00")
        self._value = int.from_bytes(raw, "big")
        self._left = 8 * len(raw)

    def bits(self, count: int) -> int:
        """Unsigned integer of ``count`` bits. Raises ValueError past the end."""
        if count > self._left:
            raise ValueError("the header is truncated")
        self._left -= count
        return self._value >> self._left & (1 << count) - 1

    def flag(self) -> bool:
        return self.bits(1) == 1

    def ue(self) -> int:
        """Unsigned Exp-Golomb code (H.264 §9.1)."""
        rest = self._value & (1 << self._left) - 1
        zeros = self._left - rest.bit_length()
        if zeros > 31:
            raise ValueError("an Exp-Golomb code is too long")
        return self.bits(2 * zeros + 1) - 1

    def skip_ue(self, count: int) -> None:
        """Skip Exp-Golomb codes, signed or not."""
        for _ in range(count):
            self.ue()

    def se(self) -> int:
        """Signed Exp-Golomb code (H.264 §9.1.1)."""
        code = self.ue()
        return (code + 1) // 2 if code & 1 else -(code // 2)


@dataclass(frozen=True, slots=True)
class Sequence:
    """Fields of a sequence parameter set: id, coded size, bit depth, reference count, and what slice headers depend on.

    ``order_bits``: length of ``pic_order_cnt_lsb``, 0 if absent.
    """

    number: int
    width: int
    height: int
    chroma: int
    depth: int
    references: int
    colour_planes: bool
    order_bits: int

    @property
    def pictures(self) -> int:
        """Pictures in memory: the references, the current one and the one on display."""
        return self.references + 2

    @property
    def samples_per_pixel(self) -> float:
        """By ``chroma_format_idc``: 4:0:0, 4:2:0, 4:2:2, 4:4:4."""
        return (1.0, 1.5, 2.0, 3.0)[self.chroma & 3]


@dataclass(frozen=True, slots=True)
class H264Sequence(Sequence):
    """``order_type``: ``pic_order_cnt_type``; ``order_deltas``: whether type 1 sends deltas. ``frames_only``: not
    interlaced."""

    frame_num_bits: int
    gaps_allowed: bool
    order_type: int
    order_deltas: bool
    frames_only: bool


def sequences(codec: str, data: bytes) -> Iterator[Sequence]:
    """All parsable sequence parameter sets in an Annex-B packet."""
    if codec not in FRAMED_CODECS:
        return
    sps, read = (H264_SPS, read_h264_sequence) if codec == "h264" else (HEVC_SPS, _read_hevc_sequence)
    for kind, start in typed_units(codec, data):
        if kind == sps:
            try:
                yield read(data[start : start + 512])
            except ValueError:
                continue


def _read_hevc_sequence(unit: bytes) -> Sequence:
    bits = Bits(unit[1:])
    if bits.bits(8) >> 3:
        raise ValueError("a parameter set of another layer, which decoders ignore")
    return read_hevc_sequence_start(bits)


def read_hevc_sequence_start(bits: Bits) -> Sequence:
    """Parse the fields up to the picture buffer sizes (H.265 §7.3.2.2.1), after the two header bytes. Raises
    ValueError if truncated."""
    bits.bits(4)
    sub_layers = bits.bits(3)
    bits.bits(1)
    # profile_tier_level (§7.3.3)
    bits.bits(88 + 8)
    present = [(bits.bits(1), bits.bits(1)) for _ in range(sub_layers)]
    if sub_layers:
        bits.bits(2 * (8 - sub_layers))
    for profile, level in present:
        bits.bits(88 * profile + 8 * level)
    number, chroma = bits.ue(), bits.ue()
    colour_planes = chroma == 3 and bits.flag()
    width, height = bits.ue(), bits.ue()
    if bits.flag():
        bits.skip_ue(4)
    depth = 8 + max(bits.ue(), bits.ue())
    order_bits = bits.ue() + 4
    references = 0
    for _ in range(sub_layers + 1 if bits.flag() else 1):
        # sps_max_dec_pic_buffering_minus1: the buffer without the current picture, hence the references.
        references = max(references, bits.ue())
        bits.skip_ue(2)
    return Sequence(number, width, height, chroma, depth, references, colour_planes, order_bits)


def read_h264_sequence(unit: bytes) -> H264Sequence:
    """Parse a sequence parameter set up to the picture size (H.264 §7.3.2.1.1). Raises ValueError if truncated."""
    bits = Bits(unit[1:])
    profile = bits.bits(8)
    bits.bits(16)
    number = bits.ue()
    colour_planes, chroma, depth = False, 1, 8
    if profile in _CHROMA_PROFILES:
        chroma = bits.ue()
        colour_planes = chroma == 3 and bits.flag()
        depth = 8 + max(bits.ue(), bits.ue())
        bits.bits(1)
        if bits.flag():
            for index in range(8 if chroma != 3 else 12):
                if bits.flag():
                    _skip_scaling_list(bits, 16 if index < 6 else 64)
    frame_num_bits = bits.ue() + 4
    order, order_bits, order_deltas = bits.ue(), 0, False
    if order == 0:
        order_bits = bits.ue() + 4
    elif order == 1:
        order_deltas = not bits.flag()
        bits.skip_ue(2)
        bits.skip_ue(bits.ue())
    references, gaps_allowed = bits.ue(), bits.flag()
    width, height = 16 * (bits.ue() + 1), 16 * (bits.ue() + 1)
    frames_only = bits.flag()
    if not frames_only:
        # Interlaced: the coded height is that of one field.
        height *= 2
    return H264Sequence(
        number,
        width,
        height,
        chroma,
        depth,
        references,
        colour_planes,
        order_bits,
        frame_num_bits,
        gaps_allowed,
        order,
        order_deltas,
        frames_only,
    )


def read_reference_counts(bits: Bits, kind: PictureType, default: tuple[int, int]) -> list[int]:
    """Number of entries in each reference list of a slice (H.264 §7.3.3, H.265 §7.3.6.1); ``default``: from its picture
    parameter set. Raises ValueError if truncated or out of range."""
    lists = ("I", "P", "B").index(kind)
    counts = list(default[:lists])
    if lists and bits.flag():
        counts = [bits.ue() + 1 for _ in range(lists)]
    if max(counts, default=0) > MOST_REFERENCES:
        raise ValueError("too many references")
    return counts


def _skip_scaling_list(bits: Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.se()) % 256
        last = following or last


@dataclass(frozen=True, slots=True)
class SliceInfo:
    """Read from an H.264 packet's first slice. ``lost``: a reference picture before it is missing."""

    reference: bool
    lost: bool


class H264FrameNumbers:
    """Tracks ``frame_num`` of one stream (H.264 §7.4.3) to detect lost reference pictures.

    A picture's number equals that of the last reference picture, or one more; otherwise a reference is missing. Streams
    that allow gaps (temporal layers) or whose parameter sets are unknown are not checked.
    """

    def __init__(self, parameter_sets: bytes = b"") -> None:
        self._sequence: H264Sequence | None = None
        self._last: int | None = None
        self.inspect(parameter_sets)

    def reset(self) -> None:
        """Do not check the next picture: it follows a known gap."""
        self._last = None

    def inspect(self, data: bytes) -> SliceInfo:
        """Inspect one Annex-B packet, in decoding order."""
        for kind, start in typed_units("h264", data):
            if kind == H264_SPS:
                try:
                    self._sequence = read_h264_sequence(data[start : start + 512])
                except ValueError:
                    self._sequence = None
            elif kind in (H264_SLICE, 2, H264_IDR):
                return self._picture(data[start + 1 : start + 33], kind == H264_IDR, bool(data[start] & 0x60))
        return SliceInfo(reference=False, lost=False)

    def _picture(self, payload: bytes, idr: bool, reference: bool) -> SliceInfo:
        if self._sequence is None:
            return SliceInfo(reference, lost=False)
        try:
            bits = Bits(payload)
            bits.skip_ue(3)
            if self._sequence.colour_planes:
                bits.bits(2)
            number = bits.bits(self._sequence.frame_num_bits)
        except ValueError:
            return SliceInfo(reference, lost=True)
        last, numbers = self._last, 1 << self._sequence.frame_num_bits
        lost = last is not None and not idr and not self._sequence.gaps_allowed and (number - last) % numbers > 1
        if reference:
            self._last = number
        elif last is None or lost:
            # Report a loss once: as if the reference before this non-reference picture had arrived.
            self._last = (number - 1) % numbers
        return SliceInfo(reference, lost)
