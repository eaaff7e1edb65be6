"""V-Rex's performance model: latency and energy of one step by method, cache length and machine (Kim et al., "V-Rex").

A step consists of vision tower, linear layers, attention over the selected keys, the method's selection, and the fetch
of what is not on the device. Each takes the longer of its arithmetic and memory traffic (a roofline) at the shares of
peak in :class:`Engine`; :class:`Parameters` holds the rest. Nothing is fitted per number: ``figures`` says which of the
paper's numbers the parameters were calibrated on.
"""

from dataclasses import dataclass

from cluster.lab.planning.workload import CLUSTER_TOKENS, EARLY_EXIT, HASH_BITS, PARTIAL, Method, Selection, Step
from cluster.registry import Registry

CORE_WATTS = 2.60943
"""One V-Rex core under load (Table III)."""

LANE_WATTS = 3.0
"""One PCIe lane under full load (V-Rex, section VI.A)."""

CLOCK_HZ = 800e6
"""V-Rex's clock (section VI.A)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Achieved shares of peak FLOP/s in dense products with many rows (vision tower, linear layers) and in attention of
    up to ten query rows over a long cache, and of memory bandwidth. ``layer_s``: idle seconds per decoder layer, on a
    GPU for the host's part of offloading, on V-Rex for synchronising its cores."""

    dense: float
    attention: float
    memory: float
    layer_s: float


GPU = Engine(dense=0.07, attention=0.0087, memory=0.80, layer_s=0.80e-3)
"""Calibrated on batch 1 of Fig. 13, except ``memory``, which is what copies reach on such memory."""

VREX = Engine(dense=0.20, attention=0.20, memory=0.87, layer_s=0.16e-3)
"""Calibrated on V-Rex's own latencies at 1K in Fig. 13, jointly for all four of its platforms and stages."""


@dataclass(frozen=True, slots=True)
class Platform:
    """Peak numbers of one machine in SI units. ``link``: bytes/s from where offloaded KV is stored, over ``lanes`` PCIe
    lanes; ``watts``: whole machine under load; ``units``: retrieval engines (DRE), for a GPU as many as in the
    V-Rex that the paper compares it with; ``cores``: V-Rex cores, 0 for a GPU."""

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
        """Power of off-chip memory and storage: Table I's total minus cores and lanes."""
        return max(0.0, self.watts - self.core_watts - self.lanes * LANE_WATTS)

    @property
    def place(self) -> str:
        """``edge`` (four lanes to an SSD) or ``server`` (sixteen to a host), the paper's classes."""
        return "edge" if self.lanes == 4 else "server"

    @property
    def extrapolated(self) -> bool:
        """Whether the machine is not in the paper."""
        return self.source != "V-Rex, Table I"


_PLATFORMS = (
    Platform("agx-orin", "AGX Orin", GPU, 54e12, 204.8e9, 32e9, 4e9, 4, 40.0, units=8),
    Platform("vrex8", "V-Rex8", VREX, 53.3e12, 204.8e9, 32e9, 4e9, 4, 35.0, units=8, cores=8),
    Platform("a100", "A100", GPU, 312e12, 1935e9, 80e9, 32e9, 16, 300.0, units=48),
    Platform("vrex48", "V-Rex48", VREX, 319.5e12, 1935e9, 80e9, 32e9, 16, 203.68, units=48, cores=48),
    Platform("h100", "H100 SXM", GPU, 989e12, 3350e9, 80e9, 64e9, 16, 700.0, 48, source="NVIDIA H100 SXM data sheet"),
    Platform("h200", "H200 SXM", GPU, 989e12, 4800e9, 141e9, 64e9, 16, 700.0, 48, source="NVIDIA H200 SXM data sheet"),
)
platforms: Registry[Platform] = Registry("platform", {each.name: each for each in _PLATFORMS})


HCU_BITS = 16
"""Bits that one hash-bit cluster unit compares per cycle (N_HCU-w × N_HCU-h, section VI.A)."""

WTU_SCORES = 16
"""Scores that one WiCSum threshold unit processes per cycle (N_WTU-w × N_WTU-h, section VI.A)."""


TILE_ROWS = 10
"""Query rows for which ``Engine.attention`` was calibrated: a frame's tokens."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters given by neither a data sheet nor the paper; ``docs/accelerator.md`` has their origins.

    Attributes:
        link: share of the link's peak that one long transfer reaches.
        request_bytes: overhead of each separate read, in bytes of link time.
        kept: share of ReSV's selection still on the device, from the last step or as recent tokens.
        overlap: share of the shorter of computation and fetch that the GPU baselines hide.
        sort_bytes: memory traffic per score of a full sort on a GPU.
        step_s: seconds of one data-dependent clustering step on a GPU; one per new token and layer.
        waiting: power of a GPU waiting for its link, as a share of its power under load.
        static: power of idle V-Rex cores, as a share of their power under load.
    """

    link: float = 0.90
    request_bytes: float = 5500.0
    kept: float = 0.55
    overlap: float = 0.20
    sort_bytes: float = 390.0
    step_s: float = 0.87e-3
    waiting: float = 0.60
    static: float = 0.35


PARAMETERS = Parameters()


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a step in seconds and joules. ``host``: launches and waiting for the host; ``selection``: choosing
    what to fetch, of which ``latency`` includes the unhidden part; ``fetch``: link time, ``exposed_fetch`` of it
    unhidden; ``flops``: useful operations, as in TOPS; ``link_bytes``: fetched keys and values; ``fits``: whether
    weights, and the cache unless offloaded, fit into device memory."""

    vision: float
    linear: float
    attention: float
    host: float
    selection: float
    fetch: float
    exposed_fetch: float
    latency: float
    energy: float
    flops: float
    link_bytes: float
    batch: int
    fits: bool

    @property
    def per_second(self) -> float:
        """Steps of one stream per second: frames per second for frames."""
        return 1 / self.latency

    @property
    def tops_per_watt(self) -> float:
        return self.flops / self.energy / 1e12


def predict(platform: Platform, method: Method, step: Step, parameters: Parameters = PARAMETERS) -> Prediction:
    """Predict latency and energy of a step made by ``workload.frame``, ``workload.token`` or ``workload.question``."""
    engine, model = platform.engine, step.model
    share = method.text if step.text else method.frame
    selection_kind = method.text_selection if step.text else method.frame_selection
    keys = share * step.cache + step.queries
    bandwidth = platform.memory * engine.memory

    vision = step.vision_flops / (platform.flops * engine.dense)
    linear = max(step.linear_flops / (platform.flops * engine.dense), step.weight_bytes / bandwidth)
    attended_bytes = model.kv_bytes * keys * step.batch
    attention_flops = step.attention_flops(keys)
    attention = max(attention_flops / _attention_rate(platform, step), attended_bytes / bandwidth)
    # A GPU without offloading launches kernels ahead; one that fetches synchronises at every layer.
    host = engine.layer_s * model.layers if method.offloads or platform.cores else 0.0
    selection = _selection(platform, selection_kind, step, parameters)

    link_bytes = 0.0
    fetch = 0.0
    if method.offloads:
        link_bytes = step.cache_bytes * share * (1 - parameters.kept if method.reuses else 1.0)
        # Every separate read has an overhead; fetching everything is one long read.
        run_bytes = 0.0 if selection_kind is Selection.NONE else method.run * model.kv_layer_bytes / 2
        reads = run_bytes / (run_bytes + parameters.request_bytes) if run_bytes else 1.0
        fetch = link_bytes / (platform.link * parameters.link * reads)

    # The vision tower runs first and needs no keys, so only the language model can hide a fetch.
    decoder = linear + attention + host
    window = max(decoder, selection) if selection_kind is Selection.ENGINE else decoder + selection
    hidden = (1.0 if method.overlapped else parameters.overlap) * min(window, fetch)
    latency = vision + window + fetch - hidden

    flops = step.vision_flops + step.linear_flops + attention_flops
    traffic = step.weight_bytes + attended_bytes + link_bytes + (model.vision.weight_bytes if step.picture else 0.0)
    # Power states times their duration. A GPU works or waits for its link; V-Rex sums cores, memory with storage, and
    # link, each by its load (Tables I and III).
    if platform.cores:
        load = min(latency, flops / (platform.flops * engine.dense))
        energy = platform.core_watts * (parameters.static * latency + (1 - parameters.static) * load)
        energy += platform.memory_watts * min(latency, traffic / bandwidth) + platform.lanes * LANE_WATTS * fetch
    else:
        energy = platform.watts * (latency - (fetch - hidden) * (1 - parameters.waiting))
    held = model.held_bytes + (0.0 if method.offloads else step.cache_bytes)
    return Prediction(
        vision=vision,
        linear=linear,
        attention=attention,
        host=host,
        selection=selection,
        fetch=fetch,
        exposed_fetch=fetch - hidden,
        latency=latency,
        energy=energy,
        flops=flops,
        link_bytes=link_bytes,
        batch=step.batch,
        fits=held <= platform.memory_bytes,
    )


def _attention_rate(platform: Platform, step: Step) -> float:
    """FLOP/s of attention. Beyond ``TILE_ROWS`` query rows, for which the share was calibrated, the rate grows with the
    rows up to that of dense products."""
    engine = platform.engine
    return platform.flops * min(engine.dense, engine.attention * max(1.0, step.queries / TILE_ROWS))


def _selection(platform: Platform, kind: Selection, step: Step, parameters: Parameters) -> float:
    """Seconds of selecting what to fetch, over all layers."""
    model, clusters = step.model, step.cache / CLUSTER_TOKENS
    score_s = 2.0 * model.head_dim / _attention_rate(platform, step)
    sort_s = parameters.sort_bytes / (platform.memory * platform.engine.memory)
    wait = platform.engine.layer_s * model.layers
    scores = step.scores(clusters)
    if kind is Selection.NONE:
        return 0.0
    if kind is Selection.TOKENS:
        return step.scores(step.cache) * (PARTIAL * score_s + sort_s) + wait
    if kind is Selection.FRAMES:
        # Compares one representative per frame with the mean query.
        return step.scores(step.cache / model.frame_tokens) / step.queries * (score_s + sort_s) + wait
    if kind is Selection.CLUSTERS:
        # Tokens join clusters sequentially, since each may found the cluster that the next one joins; the sequences of
        # a batch run in parallel.
        return scores * (score_s + sort_s) + step.queries * model.layers * parameters.step_s + wait
    compared = step.queries * step.batch * model.layers * model.kv_heads * clusters * HASH_BITS
    cycles = compared / HCU_BITS + scores * (1 + EARLY_EXIT) / WTU_SCORES
    return scores * score_s + cycles / (platform.units * CLOCK_HZ)
