"""Slice headers of H.264 and HEVC (ITU-T H.264 §7.3.3, H.265 §7.3.6): type, quantiser and layer of a coded picture.

Read from a packet's first slice without decoding. The whole header has to be walked, since the quantiser is near its
end; what lies behind it is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.codec.nal import (
    H264_IDR,
    H264_PPS,
    H264_SLICE,
    H264_SPS,
    HEVC_PPS,
    HEVC_SPS,
    HEVC_VPS,
    Bits,
    H264Sequence,
    read_h264_sequence,
    skip_scaling_list,
    unit_kind,
    unit_starts,
)

PictureType = Literal["I", "P", "B"]

_HEADER_BYTES = 256
"""Most bytes of a slice header that are read: weights of 32 references fit."""
_SETS_BYTES = 2048
_MOST_REFERENCES = 32
_MOST_SETS = 64


@dataclass(frozen=True, slots=True)
class CodedPicture:
    """``kind``: type of the first slice. ``qp``: its luma quantiser, 0..51 in 8 bit. ``reference``: whether later
    pictures of its layer may refer to it. ``layer``: HEVC's temporal layer, 0 in H.264."""

    kind: PictureType
    qp: int
    reference: bool
    layer: int = 0


class SliceHeaders:
    """Reads the packets of one stream in decoding order, and the parameter sets among them.

    A packet without a readable first slice, or with unknown parameter sets, gives None. Every parameter set replaces
    the last one of its number; a damaged one removes it.
    """

    def __init__(self, codec: str, parameter_sets: bytes = b"") -> None:
        self._codec = codec
        self._h264: dict[int, H264Sequence] = {}
        self._h264_pictures: dict[int, _H264Picture] = {}
        self._hevc: dict[int, _HevcSequence] = {}
        self._hevc_pictures: dict[int, _HevcPicture] = {}
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
                    return _h264_slice(payload, data[start], self._h264, self._h264_pictures)
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
                number, picture = _read_h264_picture(Bits(payload))
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
                    return _hevc_slice(payload, kind, layer, self._hevc, self._hevc_pictures)
                except (ValueError, KeyError, IndexError):
                    return None
        return None

    def _keep_hevc_set(self, kind: int, payload: bytes) -> None:
        try:
            if kind == HEVC_SPS:
                number, sequence = _read_hevc_sequence(Bits(payload))
                self._hevc[number] = sequence
            else:
                number, picture = _read_hevc_picture(Bits(payload))
                self._hevc_pictures[number] = picture
        except ValueError:
            (self._hevc if kind == HEVC_SPS else self._hevc_pictures).clear()


# -- H.264 ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _H264Picture:
    """Fields of a picture parameter set (§7.3.2.2) that slice headers depend on."""

    sequence: int
    cabac: bool
    order_present: bool
    references: tuple[int, int]
    weighted: bool
    weighted_b: int
    qp: int
    redundant: bool


def _read_h264_picture(bits: Bits) -> tuple[int, _H264Picture]:
    number, sequence = bits.ue(), bits.ue()
    cabac, order_present = bool(bits.bits(1)), bool(bits.bits(1))
    if bits.ue():
        raise ValueError("slice groups, which nobody uses")
    references = bits.ue() + 1, bits.ue() + 1
    weighted, weighted_b = bool(bits.bits(1)), bits.bits(2)
    qp = 26 + bits.se()
    bits.se()
    bits.se()
    bits.bits(2)
    redundant = bool(bits.bits(1))
    return number, _H264Picture(sequence, cabac, order_present, references, weighted, weighted_b, qp, redundant)


def _h264_slice(
    payload: bytes, header: int, sequences: dict[int, H264Sequence], pictures: dict[int, _H264Picture]
) -> CodedPicture:
    bits = Bits(payload)
    idr, reference = unit_kind("h264", header) == H264_IDR, bool(header & 0x60)
    bits.ue()
    # SP and SI, of the extended profile, are read as P and I.
    kind: PictureType = ("P", "B", "I", "P", "I")[bits.ue() % 5]  # type: ignore[assignment]
    picture = pictures[bits.ue()]
    sequence = sequences[picture.sequence]
    if sequence.colour_planes:
        bits.bits(2)
    bits.bits(sequence.frame_num_bits)
    field = not sequence.frames_only and bool(bits.bits(1))
    if field:
        bits.bits(1)
    if idr:
        bits.ue()
    if sequence.order_type == 0:
        bits.bits(sequence.order_bits)
        if picture.order_present and not field:
            bits.se()
    elif sequence.order_type == 1 and sequence.order_deltas:
        bits.se()
        if picture.order_present and not field:
            bits.se()
    if picture.redundant:
        bits.ue()
    if kind == "B":
        bits.bits(1)
    counts = _h264_reference_counts(bits, kind, picture)
    _skip_h264_list_changes(bits, kind)
    if (picture.weighted and kind == "P") or (picture.weighted_b == 1 and kind == "B"):
        _skip_h264_weights(bits, counts, chroma=bool(sequence.chroma) and not sequence.colour_planes)
    if reference:
        _skip_h264_marking(bits, idr)
    if picture.cabac and kind != "I":
        bits.ue()
    return CodedPicture(kind, picture.qp + bits.se(), reference)


def _h264_reference_counts(bits: Bits, kind: PictureType, picture: _H264Picture) -> list[int]:
    if kind == "I":
        return []
    lists = 2 if kind == "B" else 1
    counts = list(picture.references[:lists])
    if bits.bits(1):
        counts = [bits.ue() + 1 for _ in range(lists)]
    if max(counts) > _MOST_REFERENCES:
        raise ValueError("more references than there can be")
    return counts


def _skip_h264_list_changes(bits: Bits, kind: PictureType) -> None:
    for _ in range(0 if kind == "I" else 2 if kind == "B" else 1):
        if bits.bits(1):
            while bits.ue() != 3:
                bits.ue()


def _skip_h264_weights(bits: Bits, counts: list[int], *, chroma: bool) -> None:
    bits.ue()
    if chroma:
        bits.ue()
    for count in counts:
        for _ in range(count):
            if bits.bits(1):
                bits.se()
                bits.se()
            if chroma and bits.bits(1):
                for _ in range(4):
                    bits.se()


def _skip_h264_marking(bits: Bits, idr: bool) -> None:
    if idr:
        bits.bits(2)
    elif bits.bits(1):
        while operation := bits.ue():
            for _ in range(2 if operation == 3 else 0 if operation == 5 else 1):
                bits.ue()


# -- HEVC -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _HevcSequence:
    """Fields of a sequence parameter set (§7.3.2.2) that slice headers depend on. ``blocks``: coding tree blocks.

    ``sets``: for each short-term reference picture set its pictures' distances, and which of them are used.
    """

    chroma: int
    planes: bool
    order_bits: int
    sets: tuple[_ReferenceSet, ...]
    long_term: int | None
    long_term_used: tuple[bool, ...]
    motion_prediction: bool
    offsets: bool


@dataclass(frozen=True, slots=True)
class _ReferenceSet:
    """A short-term reference picture set (§7.4.8): distances to earlier and to later pictures, each with its use."""

    before: tuple[tuple[int, bool], ...]
    after: tuple[tuple[int, bool], ...]

    @property
    def used(self) -> int:
        return sum(used for _, used in self.before + self.after)


@dataclass(frozen=True, slots=True)
class _HevcPicture:
    """Fields of a picture parameter set (§7.3.2.3) that slice headers depend on."""

    sequence: int
    output: bool
    extra_bits: int
    cabac_init: bool
    references: tuple[int, int]
    qp: int
    weighted: bool
    weighted_b: bool
    list_changes: bool


def _read_hevc_sequence(bits: Bits) -> tuple[int, _HevcSequence]:
    bits.bits(4)
    sub_layers = bits.bits(3)
    bits.bits(1)
    _skip_profile(bits, sub_layers)
    number, chroma = bits.ue(), bits.ue()
    planes = chroma == 3 and bool(bits.bits(1))
    bits.ue()
    bits.ue()
    if bits.bits(1):
        for _ in range(4):
            bits.ue()
    bits.ue()
    bits.ue()
    order_bits = bits.ue() + 4
    for _ in range(sub_layers + 1 if bits.bits(1) else 1):
        for _ in range(3):
            bits.ue()
    for _ in range(6):
        bits.ue()
    if bits.bits(1) and bits.bits(1):
        _skip_hevc_scaling(bits)
    bits.bits(1)
    offsets = bool(bits.bits(1))
    if bits.bits(1):
        bits.bits(8)
        bits.ue()
        bits.ue()
        bits.bits(1)
    sets: list[_ReferenceSet] = []
    count = bits.ue()
    if count > _MOST_SETS:
        raise ValueError("more reference picture sets than there can be")
    for index in range(count):
        sets.append(_read_reference_set(bits, sets, index, count))
    long_term, used = None, []
    if bits.bits(1):
        long_term = bits.ue()
        if long_term > _MOST_REFERENCES:
            raise ValueError("more long-term references than there can be")
        for _ in range(long_term):
            bits.bits(order_bits)
            used.append(bool(bits.bits(1)))
    motion_prediction = bool(bits.bits(1))
    return number, _HevcSequence(
        chroma, planes, order_bits, tuple(sets), long_term, tuple(used), motion_prediction, offsets
    )


def _skip_profile(bits: Bits, sub_layers: int) -> None:
    """``profile_tier_level`` (§7.3.3)."""
    bits.bits(88 + 8)
    present = [(bits.bits(1), bits.bits(1)) for _ in range(sub_layers)]
    if sub_layers:
        bits.bits(2 * (8 - sub_layers))
    for profile, level in present:
        bits.bits(88 * profile + 8 * level)


def _skip_hevc_scaling(bits: Bits) -> None:
    """``scaling_list_data`` (§7.3.4)."""
    for size in range(4):
        for _ in range(2 if size == 3 else 6):
            if not bits.bits(1):
                bits.ue()
                continue
            if size > 1:
                bits.se()
            for _ in range(min(64, 1 << (4 + (size << 1)))):
                bits.se()


def _read_reference_set(bits: Bits, sets: list[_ReferenceSet], index: int, count: int) -> _ReferenceSet:
    """``st_ref_pic_set`` (§7.3.7) with the derivation of §7.4.8; ``index`` = ``count`` in a slice header.

    Raises:
        ValueError: cut short, or more pictures than there can be.
    """
    if index and bits.bits(1):
        back = bits.ue() + 1 if index == count else 1
        if back > index:
            raise ValueError("a reference picture set is predicted from none")
        return _predict_reference_set(bits, sets[index - back])
    counts = bits.ue(), bits.ue()
    if sum(counts) > _MOST_REFERENCES:
        raise ValueError("more reference pictures than there can be")
    halves: list[tuple[tuple[int, bool], ...]] = []
    for sign, pictures in zip((-1, 1), counts, strict=True):
        distance, half = 0, []
        for _ in range(pictures):
            distance += sign * (bits.ue() + 1)
            half.append((distance, bool(bits.bits(1))))
        halves.append(tuple(half))
    return _ReferenceSet(*halves)


def _predict_reference_set(bits: Bits, base: _ReferenceSet) -> _ReferenceSet:
    sign = bits.bits(1)
    delta = (1 - 2 * sign) * (bits.ue() + 1)
    distances = [distance for distance, _ in base.before + base.after]
    kept: list[tuple[int, bool]] = []
    for distance in [*distances, 0]:
        used = bool(bits.bits(1))
        if used or bits.bits(1):
            kept.append((distance + delta, used))
    before = sorted((each for each in kept if each[0] < 0), reverse=True)
    after = sorted(each for each in kept if each[0] > 0)
    if len(before) + len(after) > _MOST_REFERENCES:
        raise ValueError("more reference pictures than there can be")
    return _ReferenceSet(tuple(before), tuple(after))


def _read_hevc_picture(bits: Bits) -> tuple[int, _HevcPicture]:
    number, sequence = bits.ue(), bits.ue()
    bits.bits(1)
    output, extra_bits = bool(bits.bits(1)), bits.bits(3)
    bits.bits(1)
    cabac_init = bool(bits.bits(1))
    references = bits.ue() + 1, bits.ue() + 1
    qp = 26 + bits.se()
    bits.bits(2)
    if bits.bits(1):
        bits.ue()
    bits.se()
    bits.se()
    bits.bits(1)
    weighted, weighted_b = bool(bits.bits(1)), bool(bits.bits(1))
    bits.bits(1)
    tiles = bits.bits(1)
    bits.bits(1)
    if tiles:
        columns, rows = bits.ue(), bits.ue()
        if columns > 64 or rows > 64:
            raise ValueError("more tiles than there can be")
        if not bits.bits(1):
            for _ in range(columns + rows):
                bits.ue()
        bits.bits(1)
    bits.bits(1)
    if bits.bits(1):
        bits.bits(1)
        if not bits.bits(1):
            bits.se()
            bits.se()
    if bits.bits(1):
        _skip_hevc_scaling(bits)
    changes = bool(bits.bits(1))
    return number, _HevcPicture(
        sequence, output, extra_bits, cabac_init, references, qp, weighted, weighted_b, changes
    )


def _hevc_slice(
    payload: bytes, unit: int, layer: int, sequences: dict[int, _HevcSequence], pictures: dict[int, _HevcPicture]
) -> CodedPicture:
    bits = Bits(payload)
    if not bits.bits(1):
        raise ValueError("not the picture's first slice")
    if 16 <= unit <= 23:
        bits.bits(1)
    picture = pictures[bits.ue()]
    sequence = sequences[picture.sequence]
    bits.bits(picture.extra_bits)
    code = bits.ue()
    if code > 2:
        raise ValueError("no such slice type")
    kind: PictureType = ("B", "P", "I")[code]  # type: ignore[assignment]
    if picture.output:
        bits.bits(1)
    if sequence.planes:
        bits.bits(2)
    current, motion_prediction = 0, False
    if unit not in (19, 20):
        bits.bits(sequence.order_bits)
        current = _hevc_reference_count(bits, sequence)
        motion_prediction = sequence.motion_prediction and bool(bits.bits(1))
    if sequence.offsets:
        bits.bits(1 if sequence.chroma == 0 or sequence.planes else 2)
    if kind != "I":
        _skip_hevc_prediction(bits, kind, picture, sequence, current, motion_prediction)
    reference = unit >= 16 or bool(unit & 1)
    return CodedPicture(kind, picture.qp + bits.se(), reference, layer)


def _hevc_reference_count(bits: Bits, sequence: _HevcSequence) -> int:
    """``NumPicTotalCurr`` (§7.4.7.2): pictures that this one may refer to."""
    count = len(sequence.sets)
    if not bits.bits(1):
        chosen = _read_reference_set(bits, list(sequence.sets), count, count)
    else:
        chosen = sequence.sets[bits.bits((count - 1).bit_length()) if count > 1 else 0]
    current = chosen.used
    if sequence.long_term is None:
        return current
    known = bits.ue() if sequence.long_term else 0
    fresh = bits.ue()
    if known + fresh > _MOST_REFERENCES:
        raise ValueError("more long-term references than there can be")
    for index in range(known + fresh):
        if index < known:
            place = bits.bits((sequence.long_term - 1).bit_length()) if sequence.long_term > 1 else 0
            current += sequence.long_term_used[place]
        else:
            bits.bits(sequence.order_bits)
            current += bits.bits(1)
        if bits.bits(1):
            bits.ue()
    return current


def _skip_hevc_prediction(
    bits: Bits,
    kind: PictureType,
    picture: _HevcPicture,
    sequence: _HevcSequence,
    current: int,
    motion_prediction: bool,
) -> None:
    """The fields of P and B slices up to the quantiser."""
    lists = 2 if kind == "B" else 1
    counts = list(picture.references[:lists])
    if bits.bits(1):
        counts = [bits.ue() + 1 for _ in range(lists)]
    if max(counts) > _MOST_REFERENCES:
        raise ValueError("more references than there can be")
    if picture.list_changes and current > 1:
        entry = (current - 1).bit_length()
        for count in counts:
            if bits.bits(1):
                bits.bits(entry * count)
    if kind == "B":
        bits.bits(1)
    if picture.cabac_init:
        bits.bits(1)
    if motion_prediction:
        first = kind == "P" or bool(bits.bits(1))
        if counts[0 if first else 1] > 1:
            bits.ue()
    if (picture.weighted and kind == "P") or (picture.weighted_b and kind == "B"):
        _skip_hevc_weights(bits, counts, chroma=sequence.chroma != 0 and not sequence.planes)
    bits.ue()


def _skip_hevc_weights(bits: Bits, counts: list[int], *, chroma: bool) -> None:
    """``pred_weight_table`` (§7.3.6.3) of pictures of one layer at other times than this one's."""
    bits.ue()
    if chroma:
        bits.se()
    for count in counts:
        luma = [bits.bits(1) for _ in range(count)]
        colour = [bits.bits(1) for _ in range(count)] if chroma else [0] * count
        for index in range(count):
            for _ in range(2 * luma[index] + 4 * colour[index]):
                bits.se()
