"""Counters of one camera's stream."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CodecStats:
    """Counters of one stream since its start. ``resyncs``: by reason:

    ``gap`` (sequence hole), ``lost_reference`` (found in the bitstream), ``corrupt``, ``timestamps``, ``resolution``,
    ``codec``, ``too_large``, and what callers of ``resync`` say. ``gaps`` counts the first two. ``refusal``: why
    nothing is decoded now, a sentence; it goes when a picture comes. ``scenes``: fresh samples; all but the first are
    of a clock that jumped or of another grid. ``last_pts``: newest shown picture.
    ``frames_spared``: never decoded, as nothing happened in them (see LazyDecode).
    """

    packets: int = 0
    packets_skipped: int = 0
    packets_repeated: int = 0
    frames_decoded: int = 0
    frames_spared: int = 0
    frames_sampled: int = 0
    anchors: int = 0
    scenes: int = 0
    decode_errors: int = 0
    corrupt_frames: int = 0
    gaps: int = 0
    pts_missing: int = 0
    pts_repeated: int = 0
    pts_jumps: int = 0
    resyncs: Counter[str] = field(default_factory=Counter)
    trusted: bool = False
    codec: str = ""
    width: int = 0
    height: int = 0
    cue: str = ""
    refusal: str = ""
    last_pts: int | None = None
