"""Types shared between packages: frozen, slotted dataclasses over numpy arrays.

Nothing here imports torch, Ray or PyAV, which keeps decoder processes small. Docstrings give array shapes; times are
integer microseconds on the camera's clock (``pts``) unless a name ends in ``_s`` (seconds, float).
"""

from cluster.types.answers import (
    Answer,
    AskResult,
    AskSpec,
    DeletedMemory,
    MemoryStatus,
    Moment,
    Timing,
    TokenCount,
    WindowRequest,
)
from cluster.types.cameras import (
    CameraStateName,
    CameraStatus,
    LastAnswer,
    MemorySpec,
    PictureHealth,
    Question,
    StreamSpec,
)
from cluster.types.pictures import (
    MICROSECONDS,
    THUMBNAIL_STRIDE,
    BoolGrid,
    ChangeGrid,
    EncodedPacket,
    FloatGrid,
    FrameSample,
    FrameTrace,
    PatchGeometry,
    PatchGrid,
    PictureHeader,
    SampledPicture,
    ShownPicture,
    UInt8Array,
    cell_means,
)

__all__ = [
    "MICROSECONDS",
    "THUMBNAIL_STRIDE",
    "Answer",
    "AskResult",
    "AskSpec",
    "BoolGrid",
    "CameraStateName",
    "CameraStatus",
    "ChangeGrid",
    "DeletedMemory",
    "EncodedPacket",
    "FloatGrid",
    "FrameSample",
    "FrameTrace",
    "LastAnswer",
    "MemorySpec",
    "MemoryStatus",
    "Moment",
    "PatchGeometry",
    "PatchGrid",
    "PictureHeader",
    "PictureHealth",
    "Question",
    "SampledPicture",
    "ShownPicture",
    "StreamSpec",
    "Timing",
    "TokenCount",
    "UInt8Array",
    "WindowRequest",
    "cell_means",
]
