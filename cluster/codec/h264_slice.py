"""H.264 picture parameter sets and slice headers up to the quantiser (ITU-T H.264 §7.3.2.2, §7.3.3)."""

from dataclasses import dataclass

from cluster.codec.nal import H264_IDR, Bits, CodedPicture, H264Sequence, PictureType, unit_kind

_MOST_REFERENCES = 32


@dataclass(frozen=True, slots=True)
class H264Picture:
    """Fields of a picture parameter set (§7.3.2.2) that slice headers depend on."""

    sequence: int
    cabac: bool
    order_present: bool
    references: tuple[int, int]
    weighted: bool
    weighted_b: int
    qp: int
    redundant: bool


def read_h264_picture(bits: Bits) -> tuple[int, H264Picture]:
    """Number and fields of a picture parameter set.

    Raises:
        ValueError: cut short, or with slice groups.
    """
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
    return number, H264Picture(sequence, cabac, order_present, references, weighted, weighted_b, qp, redundant)


def read_h264_slice(
    payload: bytes, header: int, sequences: dict[int, H264Sequence], pictures: dict[int, H264Picture]
) -> CodedPicture:
    """A slice header after the NAL unit's first byte, ``header``.

    Raises:
        ValueError: cut short or damaged.
        KeyError: its parameter sets are unknown.
    """
    bits = Bits(payload)
    idr, reference = unit_kind("h264", header) == H264_IDR, bool(header & 0x60)
    bits.ue()
    # SP and SI, of the extended profile, are read as P and I.
    kind: PictureType = ("P", "B", "I", "P", "I")[bits.ue() % 5]
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


def _h264_reference_counts(bits: Bits, kind: PictureType, picture: H264Picture) -> list[int]:
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
