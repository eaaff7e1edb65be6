"""HEVC parameter sets and slice headers up to the quantiser (ITU-T H.265 §7.3.2, §7.3.6)."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.codec.nal import Bits, CodedPicture, PictureType

_MOST_REFERENCES = 32
_MOST_SETS = 64


@dataclass(frozen=True, slots=True)
class HevcSequence:
    """Fields of a sequence parameter set (§7.3.2.2) that slice headers depend on.

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
class HevcPicture:
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


def read_hevc_sequence(bits: Bits) -> tuple[int, HevcSequence]:
    """Number and fields of a sequence parameter set. Raises ValueError: cut short or damaged."""
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
    return number, HevcSequence(
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


def read_hevc_picture(bits: Bits) -> tuple[int, HevcPicture]:
    """Number and fields of a picture parameter set. Raises ValueError: cut short or damaged."""
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
    return number, HevcPicture(sequence, output, extra_bits, cabac_init, references, qp, weighted, weighted_b, changes)


def read_hevc_slice(
    payload: bytes, unit: int, layer: int, sequences: dict[int, HevcSequence], pictures: dict[int, HevcPicture]
) -> CodedPicture:
    """A slice header after the NAL unit's two bytes: its type ``unit`` and temporal ``layer``.

    Raises:
        ValueError: cut short or damaged, or not the picture's first slice.
        KeyError: its parameter sets are unknown.
        IndexError: it refers to a reference picture set that is not there.
    """
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
    kind: PictureType = ("B", "P", "I")[code]
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


def _hevc_reference_count(bits: Bits, sequence: HevcSequence) -> int:
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
    picture: HevcPicture,
    sequence: HevcSequence,
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
