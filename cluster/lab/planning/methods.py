"""Ways to hold a cache that does not fit: what each selects, what selecting costs, and how its keys lie in storage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.registry import Registry

CLUSTER_TOKENS = 32
"""Mean members of a cluster (V-Rex, section VI.B)."""

PARTIAL = 0.3
"""Share of the key dimensions that InfiniGen's speculation reads (InfiniGen, OSDI 24, section 5)."""

HASH_BITS = 32
"""Hyperplanes (V-Rex, section VI.E)."""

EARLY_EXIT = 0.16
"""Share of a row that early-exit sorting looks at (V-Rex, section V.B)."""


class Selection(Enum):
    """How a method finds what to fetch."""

    NONE = "none"
    TOKENS = "tokens"
    FRAMES = "frames"
    CLUSTERS = "clusters"
    ENGINE = "engine"
    """Clusters, by hash-bit cluster unit and WiCSum threshold unit, beside the computation."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to keep and to retrieve keys and values.

    Attributes:
        frame, text: share of the cache that attention reads, for frames and for generated tokens (Table II).
        run: tokens that lie together in storage for one read; 0: everything in one piece.
        overlapped: fetching for the next layer runs beside computation for this one, as far as the paper says.
        reuses: what the last step selected is still on the device and is not fetched again.
        offloads: keys and values are away from the device.
    """

    name: str
    title: str
    frame: float
    text: float
    frame_selection: Selection
    text_selection: Selection
    run: float
    overlapped: bool = False
    reuses: bool = False
    offloads: bool = True


methods: Registry[Method] = Registry("retrieval method")

SCATTERED_RUN = 6.0
"""Neighbours that ReSV selects together when tokens lie in the order in which they came; calibrated on Fig. 16, what
memory mapping by clusters (KVMU) adds."""

_NONE, _TOKENS, _FRAMES = Selection.NONE, Selection.TOKENS, Selection.FRAMES
_CLUSTERS, _ENGINE = Selection.CLUSTERS, Selection.ENGINE

for _method in (
    Method("resident", "all on the device", 1.0, 1.0, _NONE, _NONE, 0, offloads=False),
    Method("flexgen", "FlexGen", 1.0, 1.0, _NONE, _NONE, 0),
    Method("infinigen", "InfiniGen", 1.0, 0.068, _NONE, _TOKENS, 1),
    Method("infinigenp", "InfiniGenP", 0.508, 0.068, _TOKENS, _TOKENS, 1),
    Method("rekv", "ReKV", 0.584, 0.312, _FRAMES, _FRAMES, 10),
    Method("resv", "ReSV", 0.327, 0.025, _CLUSTERS, _CLUSTERS, SCATTERED_RUN, overlapped=True, reuses=True),
    Method("resv-kvpu", "ReSV + KVPU", 0.327, 0.025, _ENGINE, _ENGINE, SCATTERED_RUN, overlapped=True, reuses=True),
    Method("resv-dre", "ReSV + DRE", 0.327, 0.025, _ENGINE, _ENGINE, CLUSTER_TOKENS, overlapped=True, reuses=True),
):
    methods.register(_method.name)(_method)
