"""Machines that a plan knows: peak numbers from the paper's Table I or public data sheets, and how much is reached."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.registry import Registry

CORE_WATTS = 2.60943
"""One V-Rex core under load (Table III)."""

LANE_WATTS = 3.0
"""One PCIe lane under full load (V-Rex, section VI.A)."""

CLOCK_HZ = 800e6
"""Of V-Rex (section VI.A)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How much of the peak numbers a kind of machine reaches.

    Attributes:
        dense: share of peak FLOP/s in dense products with many rows (vision tower, linear layers).
        attention: share of peak FLOP/s in attention of up to ten query rows over a long cache.
        memory: share of peak memory bandwidth.
        layer_s: seconds per decoder layer in which nothing computes. On a GPU the host's part of offloading; on
            V-Rex what its cores need to meet.
    """

    dense: float
    attention: float
    memory: float
    layer_s: float


GPU = Engine(dense=0.07, attention=0.0087, memory=0.80, layer_s=0.80e-3)
"""Calibrated on Fig. 13's batch of one, except ``memory``, what copying reaches on such memory."""

VREX = Engine(dense=0.20, attention=0.20, memory=0.87, layer_s=0.16e-3)
"""Calibrated on V-Rex's own latencies at 1K in Fig. 13, all four of the paper's platforms and stages at once."""


@dataclass(frozen=True, slots=True)
class Platform:
    """Peak numbers of one machine, SI units.

    Attributes:
        link: bytes/s from where offloaded keys and values are.
        lanes: PCIe lanes of that link.
        watts: power of the whole machine under load.
        units: retrieval engines (DRE); on a GPU as many as the V-Rex that the paper puts beside it has.
        cores: V-Rex cores, 0 for a GPU.
        source: where the numbers are from.
    """

    name: str
    title: str
    engine: Engine
    flops: float
    memory: float
    memory_bytes: float
    link: float
    lanes: int
    watts: float
    units: int
    cores: int = 0
    source: str = "V-Rex, Table I"

    @property
    def core_watts(self) -> float:
        return self.cores * CORE_WATTS

    @property
    def memory_watts(self) -> float:
        """What Table I's power leaves after cores and lanes: off-chip memory and storage."""
        return max(0.0, self.watts - self.core_watts - self.lanes * LANE_WATTS)

    @property
    def place(self) -> str:
        """``edge`` or ``server``, as the paper divides its machines: four lanes to an SSD, or sixteen to a host."""
        return "edge" if self.lanes == 4 else "server"

    @property
    def extrapolated(self) -> bool:
        """The paper has no such machine."""
        return self.source != "V-Rex, Table I"


platforms: Registry[Platform] = Registry("platform")

for _platform in (
    Platform("agx-orin", "AGX Orin", GPU, 54e12, 204.8e9, 32e9, 4e9, 4, 40.0, units=8),
    Platform("vrex8", "V-Rex8", VREX, 53.3e12, 204.8e9, 32e9, 4e9, 4, 35.0, units=8, cores=8),
    Platform("a100", "A100", GPU, 312e12, 1935e9, 80e9, 32e9, 16, 300.0, units=48),
    Platform("vrex48", "V-Rex48", VREX, 319.5e12, 1935e9, 80e9, 32e9, 16, 203.68, units=48, cores=48),
    Platform(
        "h100", "H100 SXM", GPU, 989e12, 3350e9, 80e9, 64e9, 16, 700.0, units=48, source="NVIDIA H100 SXM data sheet"
    ),
    Platform(
        "h200", "H200 SXM", GPU, 989e12, 4800e9, 141e9, 64e9, 16, 700.0, units=48, source="NVIDIA H200 SXM data sheet"
    ),
):
    platforms.register(_platform.name)(_platform)
