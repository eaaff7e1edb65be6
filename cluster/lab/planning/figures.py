"""The paper's numbers with their places, the model's predictions, and whether parameters were calibrated on them."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.lab.planning.accelerator import Prediction, platforms, predict
from cluster.lab.planning.workload import Step, frame, methods, models, question, token

SIZES = (1_000, 5_000, 10_000, 20_000, 40_000)
"""Cache lengths of Fig. 13 in tokens."""

COIN_FRAMES, COIN_QUESTION, COIN_ANSWER = 26, 25, 39
"""The average working scenario (section III.A)."""

BOUND = 0.25
"""Mean absolute relative error that ``--check`` accepts."""

PAPER_MODEL = "llama3-8b"

MEASURED = {
    *((gpu, method) for gpu in ("agx-orin", "a100") for method in ("flexgen", "infinigen", "infinigenp", "rekv")),
    ("agx-orin", "resident"),
    ("agx-orin", "resv"),
    ("vrex8", "resv-kvpu"),
    ("vrex8", "resv-dre"),
    ("vrex48", "resv-dre"),
}
"""Platforms and methods of Figs. 13 to 16."""

STEPS: dict[str, Callable[..., Step]] = {"frame": frame, "token": token}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A number of the ``paper`` as printed, in ``unit``, and the ``model``'s value. ``calibrated``: parameters were
    calibrated on it, so that only the others are predictions. Batch 1 unless ``what`` says otherwise."""

    where: str
    what: str
    unit: str
    paper: float
    calibrated: bool
    model: float

    @property
    def error(self) -> float:
        """``model / paper - 1``."""
        return self.model / self.paper - 1

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error}


def mean_error(comparisons: list[Comparison], calibrated: bool | None = None) -> float:
    """Mean absolute relative error of the calibrated numbers, of the others, or (``None``) of all."""
    chosen = [each for each in comparisons if calibrated in (None, each.calibrated)]
    return sum(abs(each.error) for each in chosen) / len(chosen)


def run(platform: str, method: str, kind: str, cache: int, batch: int = 1) -> Prediction:
    """Predict a step of the paper's model, with platform and method by name. ``kind``: ``frame`` or ``token``."""
    step = STEPS[kind](models.get(PAPER_MODEL), cache, batch)
    return predict(platforms.get(platform), methods.get(method), step)


def end_to_end(platform: str, method: str, cache: int) -> tuple[float, float]:
    """Seconds of the average COIN scenario (frames, one question, an answer) at a fixed cache length (Figs. 4b and 14),
    and of its prefill only."""
    machine, way, model = platforms.get(platform), methods.get(method), models.get(PAPER_MODEL)
    prefill = COIN_FRAMES * predict(machine, way, frame(model, cache)).latency
    prefill += predict(machine, way, question(model, cache, 1, COIN_QUESTION)).latency
    return prefill + COIN_ANSWER * predict(machine, way, token(model, cache)).latency, prefill


BASE = {"vrex8": "agx-orin", "vrex48": "a100"}
"""The GPU that the paper compares each V-Rex with."""

Machine = tuple[str, str]
"""Names of a platform and a method on it."""

EDGE_BASE, EDGE_OURS = ("agx-orin", "flexgen"), ("vrex8", "resv-dre")


def _value(of: str, machine: Machine, kind: str = "frame", cache: int = 40_000, batch: int = 1) -> float:
    """A field of the ``Prediction`` of a step."""
    return float(getattr(run(*machine, kind, cache, batch), of))


def _gain(base: Machine, ours: Machine, of: str = "latency", **step: Any) -> float:
    """A ``Prediction`` field of ``base`` over that of ``ours``."""
    return _value(of, base, **step) / _value(of, ours, **step)


def _share(part: str, machine: Machine, cache: int) -> float:
    """A ``Prediction`` field as a percentage of a frame's latency."""
    found = run(*machine, "frame", cache)
    return 100 * float(getattr(found, part)) / found.latency


def _coin(cache: int) -> float:
    """Speed-up of V-Rex8 over the best software on AGX Orin in the average COIN scenario."""
    software = min(end_to_end("agx-orin", method, cache)[0] for method in ("flexgen", "infinigenp", "rekv"))
    return software / end_to_end(*EDGE_OURS, cache)[0]


EDGE, SERVER, FIG_16 = "Fig. 13a, VI.B", "Fig. 13b, VI.B", "Fig. 16, VI.B"
FIG_4B, FIG_4C = "Fig. 4b, III.A", "Fig. 4c, III.B"
FIG_14, FIG_15, FIG_18 = "Fig. 14, VI.B", "Fig. 15, VI.B", "Fig. 18, VI.D"
GAINS = {"latency": "speed-up", "energy": "energy gain"}

RANGES = (
    # V-Rex over FlexGen on its GPU: place, platform, stage, batch, smallest and largest over sizes, of, calibrated.
    (EDGE, "vrex8", "frame", 1, 2.2, 7.3, "latency", True),
    (EDGE, "vrex8", "frame", 4, 2.1, 13.8, "latency", False),
    (EDGE, "vrex8", "token", 1, 1.9, 15.1, "latency", True),
    (SERVER, "vrex48", "frame", 1, 2.6, 7.3, "latency", True),
    (SERVER, "vrex48", "frame", 8, 3.4, 19.7, "latency", False),
    (SERVER, "vrex48", "token", 1, 2.8, 16.8, "latency", True),
    (EDGE, "vrex8", "frame", 1, 5.5, 10.2, "energy", True),
    (EDGE, "vrex8", "frame", 4, 3.1, 12.8, "energy", False),
    (EDGE, "vrex8", "token", 1, 4.3, 18.5, "energy", False),
    (SERVER, "vrex48", "frame", 1, 9.0, 29.7, "energy", False),
    (SERVER, "vrex48", "frame", 8, 5.9, 52.2, "energy", False),
    (SERVER, "vrex48", "token", 1, 13.2, 70.6, "energy", False),
)

LATENCIES = (
    # Milliseconds, batch 1.
    *((EDGE, "vrex8", "frame", cache, ms) for cache, ms in zip(SIZES, (121, 123, 198, 200, 254), strict=True)),
    (EDGE, "vrex8", "token", 1_000, 89),
    (EDGE, "vrex8", "token", 40_000, 97),
    (SERVER, "vrex48", "frame", 1_000, 20),
    (SERVER, "vrex48", "frame", 40_000, 48),
    (SERVER, "vrex48", "token", 1_000, 14),
    (SERVER, "vrex48", "token", 40_000, 15),
)

ABLATION = (
    # Platform, method, gain over AGX Orin + FlexGen, of, calibrated. The last is also Fig. 13a's largest energy gain.
    ("agx-orin", "resv", 2.8, "latency", True),
    ("vrex8", "resv-kvpu", 6.0, "latency", True),
    ("vrex8", "resv-dre", 8.1, "latency", True),
    ("vrex8", "resv-kvpu", 9.2, "energy", False),
    ("vrex8", "resv-dre", 10.2, "energy", True),
)


def compare() -> list[Comparison]:
    """Compare the model with the paper's numbers."""
    found = []
    for where, name, kind, cache, ms in LATENCIES:
        latency = 1000 * _value("latency", (name, "resv-dre"), kind, cache)
        found.append(Comparison(where, f"{name}, {kind}, {cache // 1000}K", "ms", ms, True, latency))
    for where, name, kind, batch, low, high, of, calibrated in RANGES:
        machines = (BASE[name], "flexgen"), (name, "resv-dre")
        gains = [_gain(*machines, of, kind=kind, cache=cache, batch=batch) for cache in SIZES]
        what = f"{name} over {BASE[name]} + flexgen, {kind}, batch {batch}: {GAINS[of]}"
        found.append(Comparison(where, f"{what}, smallest", "×", low, calibrated, min(gains)))
        found.append(Comparison(where, f"{what}, largest", "×", high, calibrated, max(gains)))
    for name, method, paper, of, calibrated in ABLATION:
        what = f"{name} + {method} over agx-orin + flexgen, 40K: {GAINS[of]}"
        found.append(Comparison(FIG_16, what, "×", paper, calibrated, _gain(EDGE_BASE, (name, method), of)))
    return found + [Comparison(*row) for row in _others()]


def _others() -> Iterator[tuple[str, str, str, float, bool, float]]:
    tops = [_value("tops_per_watt", ("vrex48", "resv-dre"), cache=cache, batch=8) for cache in SIZES]
    resv, kvpu, a100 = ("agx-orin", "resv"), ("vrex8", "resv-kvpu"), ("a100", "infinigen")
    # InfiniGen's selection fetches 10K of 40K tokens.
    quarter = replace(methods.get("infinigenp"), frame=0.25)
    budget = predict(platforms.get("a100"), quarter, frame(models.get(PAPER_MODEL), 40_000))
    whole, prefill = end_to_end(*a100, 80_000)
    coin = max(_coin(cache) for cache in SIZES)
    roof, roof_rekv = (_gain(EDGE_BASE, ours, batch=4) for ours in (EDGE_OURS, ("agx-orin", "rekv")))
    resident = _gain(("agx-orin", "resident"), EDGE_OURS, cache=1_000)
    yield "abstract", "vrex8, frame, 1K", "FPS", 8.3, True, _value("per_second", EDGE_OURS, cache=1_000)
    yield "abstract", "vrex8, frame, 40K", "FPS", 3.9, True, _value("per_second", EDGE_OURS)
    yield SERVER, "vrex48, frame, batch 8, least", "TOPS/W", 1.1, False, min(tops)
    yield SERVER, "vrex48, frame, batch 8, most", "TOPS/W", 1.4, False, max(tops)
    yield FIG_16, "agx-orin + resv, 40K: selection in latency", "%", 48, True, _share("selection", resv, 40_000)
    yield FIG_16, "vrex8 + resv-kvpu, 40K: selection in latency", "%", 0.5, False, _share("selection", kvpu, 40_000)
    selected, fetched = (100 * part / budget.latency for part in (budget.selection, budget.exposed_fetch))
    yield FIG_4C, "a100, InfiniGen, 10K of 40K: selection", "%", 40, True, selected
    yield FIG_4C, "a100, InfiniGen, 10K of 40K: fetch", "%", 39, True, fetched
    yield FIG_4B, "a100 + infinigen, 80K: prefill in COIN", "%", 83, False, 100 * prefill / whole
    yield FIG_4B, "a100 + infinigen, 80K: fetch in prefill", "%", 74, False, _share("exposed_fetch", a100, 80_000)
    yield FIG_14, "vrex8 over the best of agx-orin, COIN: largest speed-up", "×", 5.4, False, coin
    yield FIG_15, "vrex8 over agx-orin, all on the device, 1K: speed-up", "×", 1.5, False, resident
    yield FIG_18, "vrex8 over agx-orin + flexgen, 40K, batch 4: throughput", "×", 10.8, False, roof
    yield FIG_18, "agx-orin + rekv over flexgen, 40K, batch 4: throughput", "×", 15 / 6.6, False, roof_rekv
