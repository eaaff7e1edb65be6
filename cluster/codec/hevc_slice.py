"""HEVC parameter sets and slice headers up to the slice QP (ITU-T H.265 §7.3.2, §7.3.6)."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.codec.nal import (
    MOST_REFERENCES,
    Bits,
    CodedPicture,
    PictureType,
    Sequence,
    read_hevc_sequence_start,
    read_reference_counts,
    unit_kind,
)

_MOST_SETS = 64

_ReferenceSet = tuple[tuple[int, bool], ...]
"""A short-term reference picture set (§7.4.8): POC distances to earlier, then to later pictures, nearest first, each
with whether the current picture uses it."""


@dataclass(frozen=True, slots=True)
class HevcSequence:
    """Fields of a sequence parameter set (§7.3.2.2) that slice headers depend on; ``start``: its leading fields."""

    start: Sequence
    sets: tuple[_ReferenceSet, ...]
    long_term: int | None
    long_term_used: tuple[bool, ...]
    motion_prediction: bool
    offsets: bool

    @property
    def number(self) -> int:
        return self.start.number

    @property
    def chroma(self) -> bool:
        """Whether chroma is coded together with luma."""
        return self.start.chroma != 0 and not self.start.colour_planes


@dataclass(frozen=True, slots=True)
class HevcPicture:
    """Fields of a picture parameter set (§7.3.2.3) that slice headers depend on."""

    number: int
    sequence: int
    output: bool
    extra_bits: int
    cabac_init: bool
    references: tuple[int, int]
    qp: int
    weighted: bool
    weighted_b: bool
    list_changes: bool


def read_hevc_sequence(unit: bytes) -> HevcSequence:
    """Parse a sequence parameter set. Raises ValueError if truncated or damaged."""
    bits = Bits(unit[2:])
    start = read_hevc_sequence_start(bits)
    bits.skip_ue(6)
    if bits.flag() and bits.flag():
        _skip_hevc_scaling(bits)
    bits.bits(1)
    offsets = bits.flag()
    if bits.flag():
        bits.bits(8)
        bits.skip_ue(2)
        bits.bits(1)
    sets: list[_ReferenceSet] = []
    count = bits.ue()
    if count > _MOST_SETS:
        raise ValueError("too many reference picture sets")
    for index in range(count):
        sets.append(_read_reference_set(bits, sets, index, count))
    long_term, used = None, []
    if bits.flag():
        long_term = bits.ue()
        if long_term > MOST_REFERENCES:
            raise ValueError("too many long-term references")
        for _ in range(long_term):
            bits.bits(start.order_bits)
            used.append(bits.flag())
    return HevcSequence(start, tuple(sets), long_term, tuple(used), bits.flag(), offsets)


def _skip_hevc_scaling(bits: Bits) -> None:
    """Skip ``scaling_list_data`` (§7.3.4)."""
    for size in range(4):
        for _ in range(2 if size == 3 else 6):
            if bits.flag():
                bits.skip_ue((size > 1) + min(64, 1 << (4 + (size << 1))))
            else:
                bits.ue()


def _read_reference_set(bits: Bits, sets: list[_ReferenceSet], index: int, count: int) -> _ReferenceSet:
    """Parse ``st_ref_pic_set`` (§7.3.7), derived as in §7.4.8; ``index`` = ``count`` in a slice header. Raises
    ValueError if truncated or out of range."""
    if index and bits.flag():
        back = bits.ue() + 1 if index == count else 1
        if back > index:
            raise ValueError("a reference picture set is predicted from a missing one")
        return _predict_reference_set(bits, sets[index - back])
    counts = bits.ue(), bits.ue()
    if sum(counts) > MOST_REFERENCES:
        raise ValueError("too many reference pictures")
    pictures = []
    for sign, most in zip((-1, 1), counts, strict=True):
        distance = 0
        for _ in range(most):
            distance += sign * (bits.ue() + 1)
            pictures.append((distance, bits.flag()))
    return tuple(pictures)


def _predict_reference_set(bits: Bits, base: _ReferenceSet) -> _ReferenceSet:
    sign = bits.bits(1)
    delta = (1 - 2 * sign) * (bits.ue() + 1)
    kept: list[tuple[int, bool]] = []
    for distance in [*(distance for distance, _ in base), 0]:
        used = bits.flag()
        if used or bits.flag():
            kept.append((distance + delta, used))
    before = sorted((each for each in kept if each[0] < 0), reverse=True)
    after = sorted(each for each in kept if each[0] > 0)
    if len(before) + len(after) > MOST_REFERENCES:
        raise ValueError("too many reference pictures")
    return (*before, *after)


def read_hevc_picture(unit: bytes) -> HevcPicture:
    """Parse a picture parameter set. Raises ValueError if truncated or damaged."""
    bits = Bits(unit[2:])
    number, sequence = bits.ue(), bits.ue()
    bits.bits(1)
    output, extra_bits = bits.flag(), bits.bits(3)
    bits.bits(1)
    cabac_init = bits.flag()
    references = bits.ue() + 1, bits.ue() + 1
    qp = 26 + bits.se()
    bits.bits(2)
    if bits.flag():
        bits.ue()
    bits.skip_ue(2)
    bits.bits(1)
    weighted, weighted_b = bits.flag(), bits.flag()
    bits.bits(1)
    tiles = bits.flag()
    bits.bits(1)
    if tiles:
        columns, rows = bits.ue(), bits.ue()
        if columns > 64 or rows > 64:
            raise ValueError("too many tiles")
        if not bits.flag():
            bits.skip_ue(columns + rows)
        bits.bits(1)
    bits.bits(1)
    if bits.flag():
        bits.bits(1)
        if not bits.flag():
            bits.skip_ue(2)
    if bits.flag():
        _skip_hevc_scaling(bits)
    changes = bits.flag()
    return HevcPicture(number, sequence, output, extra_bits, cabac_init, references, qp, weighted, weighted_b, changes)


def read_hevc_slice(unit: bytes, sequences: dict[int, HevcSequence], pictures: dict[int, HevcPicture]) -> CodedPicture:
    """Parse a slice header.

    Raises:
        ValueError: truncated, damaged, or not the picture's first slice.
        KeyError: unknown parameter sets.
        IndexError: truncated, or refers to a missing reference picture set.
    """
    unit_type, layer = unit_kind("hevc", unit[0]), (unit[1] & 7) - 1
    bits = Bits(unit[2:])
    if not bits.flag():
        raise ValueError("not the picture's first slice")
    if 16 <= unit_type <= 23:
        bits.bits(1)
    picture = pictures[bits.ue()]
    sequence = sequences[picture.sequence]
    bits.bits(picture.extra_bits)
    code = bits.ue()
    if code > 2:
        raise ValueError("no such slice type")
    kind: PictureType = ("B", "P", "I")[code]
    if picture.output:
        bits.bits(1)
    if sequence.start.colour_planes:
        bits.bits(2)
    current, motion_prediction = 0, False
    if unit_type not in (19, 20):
        bits.bits(sequence.start.order_bits)
        current = _hevc_reference_count(bits, sequence)
        motion_prediction = sequence.motion_prediction and bits.flag()
    if sequence.offsets:
        bits.bits(2 if sequence.chroma else 1)
    if kind != "I":
        _skip_hevc_prediction(bits, kind, picture, sequence, current, motion_prediction)
    reference = unit_type >= 16 or unit_type % 2 == 1
    return CodedPicture(kind, picture.qp + bits.se(), reference, layer)


def _hevc_reference_count(bits: Bits, sequence: HevcSequence) -> int:
    """``NumPicTotalCurr`` (§7.4.7.2): number of pictures the current one may refer to."""
    count = len(sequence.sets)
    if not bits.flag():
        chosen = _read_reference_set(bits, list(sequence.sets), count, count)
    else:
        chosen = sequence.sets[bits.bits((count - 1).bit_length()) if count > 1 else 0]
    current = sum(used for _, used in chosen)
    if sequence.long_term is None:
        return current
    known = bits.ue() if sequence.long_term else 0
    fresh = bits.ue()
    if known + fresh > MOST_REFERENCES:
        raise ValueError("too many long-term references")
    for index in range(known + fresh):
        if index < known:
            place = bits.bits((sequence.long_term - 1).bit_length()) if sequence.long_term > 1 else 0
            current += sequence.long_term_used[place]
        else:
            bits.bits(sequence.start.order_bits)
            current += bits.bits(1)
        if bits.flag():
            bits.ue()
    return current


def _skip_hevc_prediction(
    bits: Bits,
    kind: PictureType,
    picture: HevcPicture,
    sequence: HevcSequence,
    current: int,
    motion_prediction: bool,
) -> None:
    """Skip the fields of P and B slices up to the slice QP."""
    counts = read_reference_counts(bits, kind, picture.references)
    if picture.list_changes and current > 1:
        entry = (current - 1).bit_length()
        for count in counts:
            if bits.flag():
                bits.bits(entry * count)
    if kind == "B":
        bits.bits(1)
    if picture.cabac_init:
        bits.bits(1)
    if motion_prediction:
        first = kind == "P" or bits.flag()
        if counts[0 if first else 1] > 1:
            bits.ue()
    if (picture.weighted and kind == "P") or (picture.weighted_b and kind == "B"):
        _skip_hevc_weights(bits, counts, chroma=sequence.chroma)
    bits.ue()


def _skip_hevc_weights(bits: Bits, counts: list[int], *, chroma: bool) -> None:
    """Skip ``pred_weight_table`` (§7.3.6.3), for references of the same layer at other times."""
    bits.ue()
    if chroma:
        bits.se()
    for count in counts:
        luma = sum(bits.bits(1) for _ in range(count))
        colour = sum(bits.bits(1) for _ in range(count)) if chroma else 0
        bits.skip_ue(2 * luma + 4 * colour)
