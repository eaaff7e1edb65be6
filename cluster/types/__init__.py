"""Types shared between packages: frozen, slotted dataclasses over numpy arrays.

Nothing here imports torch, Ray or PyAV, which keeps decoder processes small. Docstrings give array shapes; times are
integer microseconds on the camera's clock (``pts``) unless a name ends in ``_s`` (seconds, float).
"""

from cluster.types.answers import *  # noqa: F403
from cluster.types.cameras import *  # noqa: F403
from cluster.types.pictures import *  # noqa: F403
