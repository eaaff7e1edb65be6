"""H.264 written by hand: what no encoder would send, from cameras or senders that mean harm."""

from collections.abc import Iterator

_START = b"\x00\x00\x00\x01"
_SPS, _PPS, _IDR, _REFERENCE, _DISPOSABLE = b"\x67", b"\x68", b"\x65", b"\x61", b"\x01"
_HEVC_SPS = _START + b"\x42\x01"

_GREY = "00100111"
"""An intra macroblock of one colour: I_16x16 without residual, DC prediction, no change of the quantiser."""
_MOVING = "1" + "00100" + "1111" + "010" + "1" * 7 + "1"
"""A P_8x8 macroblock: none skipped before it, four partitions of which the first moves, no residual."""


def _ue(*values: int) -> str:
    """Exp-Golomb codes (H.264 §9.1)."""
    codes = [f"{value + 1:b}" for value in values]
    return "".join("0" * (len(code) - 1) + code for code in codes)


def _unit(header: bytes, bits: str) -> bytes:
    """An Annex-B NAL unit, with stop bit and emulation prevention."""
    bits += "1"
    bits += "0" * (-len(bits) % 8)
    out = bytearray()
    zeros = 0
    for byte in int(bits, 2).to_bytes(len(bits) // 8, "big"):
        if zeros >= 2 and byte <= 3:
            out.append(3)
            zeros = 0
        out.append(byte)
        zeros = zeros + 1 if byte == 0 else 0
    return _START + header + bytes(out)


class H264Writer:
    """Pictures of ``width`` x ``height``, multiples of 16, Main profile, CAVLC, one slice each.

    ``ordered``: the slices tell their picture order, so that pictures can be shown in another than they are sent in.
    """

    def __init__(self, width: int, height: int, references: int, *, ordered: bool = False) -> None:
        self._cols, self._rows = width // 16, height // 16
        self._references = references
        self._ordered = ordered

    def parameter_sets(self, sps: int = 0, pps: int = 0) -> bytes:
        """With these ids."""
        order = _ue(0, 12) if self._ordered else _ue(2)
        size = _ue(self._references) + "0" + _ue(self._cols - 1, self._rows - 1) + "1100"
        sequence = f"{77:08b}{0:08b}{62:08b}" + _ue(sps, 4) + order + size
        return _unit(_SPS, sequence) + _unit(_PPS, _ue(pps, sps) + "00" + _ue(0, 0, 0) + "000" + _ue(0, 0, 0) + "100")

    def key(self) -> bytes:
        """An IDR picture, all grey, with the parameter sets before it."""
        head = _ue(0, 7, 0) + f"{0:08b}" + _ue(0) + self._order(0) + "00" + _ue(0, 1)
        return self.parameter_sets() + _unit(_IDR, head + _GREY * (self._cols * self._rows))

    def skipped(self, number: int) -> bytes:
        """A reference picture that repeats the last one, in a dozen bytes."""
        return self._inter(_REFERENCE, number, 0, _ue(self._cols * self._rows))

    def disposable(self, order: int) -> bytes:
        """One that nothing refers to, shown at ``order``."""
        return self._inter(_DISPOSABLE, 1, order, _ue(self._cols * self._rows))

    def moving(self, number: int) -> bytes:
        """A reference picture with four motion vectors in every macroblock."""
        return self._inter(_REFERENCE, number, 0, _MOVING * (self._cols * self._rows))

    def all_new(self, number: int) -> bytes:
        """A P picture, and reference, in which every macroblock is intra."""
        # Behind P's own five macroblock types, and a run of none skipped.
        return self._inter(_REFERENCE, number, 0, ("1" + _ue(5 + 3) + "111") * (self._cols * self._rows))

    def _inter(self, header: bytes, number: int, order: int, macroblocks: str) -> bytes:
        head = _ue(0, 5, 0) + f"{number % 256:08b}" + self._order(order) + "00"
        return _unit(header, head + ("0" if header == _REFERENCE else "") + _ue(0, 1) + macroblocks)

    def _order(self, order: int) -> str:
        return f"{order % 65536:016b}" if self._ordered else ""


def many_references(width: int, height: int, references: int, pictures: int = 40) -> Iterator[bytes]:
    """One grey picture, repeated until every reference is held."""
    writer = H264Writer(width, height, references)
    yield writer.key()
    yield from (writer.skipped(number) for number in range(1, pictures))


def late_pictures(width: int, height: int, pictures: int = 64) -> Iterator[bytes]:
    """Asks for one reference and sends pictures back to front, so that a decoder holds back as many as it can."""
    writer = H264Writer(width, height, 1, ordered=True)
    yield writer.key()
    for index in range(pictures):
        yield writer.disposable(2 * (200 + 16 * (index // 16) + 16 - index % 16))


def many_vectors(width: int, height: int, pictures: int = 6) -> Iterator[bytes]:
    """One reference, and more vectors than any encoder would write."""
    writer = H264Writer(width, height, 1)
    yield writer.key()
    yield from (writer.moving(number) for number in range(1, pictures))


def changing_sizes(width: int, height: int, references: int, keyframes: int = 12) -> Iterator[bytes]:
    """Another size at every keyframe, each with all its references filled."""
    for index in range(keyframes):
        yield from many_references(width - 16 * index, height - 16 * (index % 3), references, references + 2)


def endless_parameter_sets(width: int, height: int, rounds: int = 20) -> Iterator[bytes]:
    """Every id there is, again and again, before each picture."""
    writer = H264Writer(width, height, 1)
    sets = b"".join(writer.parameter_sets(index % 32, index) for index in range(256))
    for _ in range(rounds):
        yield sets + writer.key()


def one_declared(packet: bytes) -> bytes:
    """A keyframe of x265's with 15 references, which declares one: nothing holds the slices to it."""
    start = packet.index(_HEVC_SPS)
    end = packet.index(_START, start + 1)
    payload = packet[start + len(_HEVC_SPS) : end].replace(b"\x00\x00\x03", b"\x00\x00")
    bits = f"{int.from_bytes(payload, 'big'):0{8 * len(payload)}b}".rstrip("0")[:-1]
    # Eight bits a sample, 8 bits of picture order, and how many pictures each layer's buffer has room for.
    before = _ue(0, 0, 4) + "1"
    at = bits.index(before + _ue(15)) + len(before)
    bits = bits[:at] + _ue(1) + bits[at + len(_ue(15)) :]
    return packet[:start] + _unit(_HEVC_SPS[len(_START) :], bits) + packet[end:]


def resized_jpeg(picture: bytes, width: int, height: int) -> bytes:
    """The same JPEG, which claims another size, with comments that make it long enough to be believed."""
    at = picture.index(b"\xff\xc0") + 5
    resized = picture[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + picture[at + 4 :]
    comment = b"\xff\xfe\xff\xff" + bytes(0xFFFF - 2)
    return resized[:2] + comment * (width * height // 256 // len(comment) + 1) + resized[2:]
