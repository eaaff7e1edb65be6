"""The paper's own numbers, each with its place, what the model says instead, and whether a parameter was set on it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cluster.lab.planning.accelerator import PARAMETERS, Parameters, Prediction, platforms, predict
from cluster.lab.planning.workload import Step, frame, methods, models, question, token

SIZES = (1_000, 5_000, 10_000, 20_000, 40_000)
"""Cache lengths of Fig. 13, tokens."""

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
"""Machines and methods of Figs. 13 to 16."""

STEPS: dict[str, Callable[..., Step]] = {"frame": frame, "token": token}

Figure = Callable[[Parameters], float]


@dataclass(frozen=True, slots=True)
class Reference:
    """``paper``: the number as printed, in ``unit``. ``calibrated``: parameters were set on it, so that only the other
    ones are predictions. ``batch`` of one unless ``what`` says otherwise."""

    where: str
    what: str
    unit: str
    paper: float
    calibrated: bool
    model: Figure


@dataclass(frozen=True, slots=True)
class Comparison:
    """A reference and what the model predicts for it."""

    reference: Reference
    model: float

    @property
    def error(self) -> float:
        """``model / paper - 1``."""
        return self.model / self.reference.paper - 1

    def as_json(self) -> dict[str, Any]:
        """The paper's number, ours and the relative error."""
        known = {name: getattr(self.reference, name) for name in ("where", "what", "unit", "paper", "calibrated")}
        return known | {"model": self.model, "error": self.error}


def compare(parameters: Parameters = PARAMETERS) -> list[Comparison]:
    """The model against every number in ``REFERENCES``."""
    return [Comparison(reference, reference.model(parameters)) for reference in REFERENCES]


def mean_error(comparisons: list[Comparison], calibrated: bool | None = None) -> float:
    """Mean absolute relative error; of those that were calibrated, of the predictions, or (``None``) of all."""
    chosen = [each for each in comparisons if calibrated in (None, each.reference.calibrated)]
    return sum(abs(each.error) for each in chosen) / len(chosen)


def run(
    platform: str, method: str, kind: str, cache: int, batch: int = 1, parameters: Parameters = PARAMETERS
) -> Prediction:
    """One step of the paper's model by names. ``kind``: ``frame`` or ``token``."""
    step = STEPS[kind](models.get(PAPER_MODEL), cache, batch)
    return predict(platforms.get(platform), methods.get(method), step, parameters)


def end_to_end(platform: str, method: str, cache: int, parameters: Parameters = PARAMETERS) -> tuple[float, float]:
    """Seconds of the average COIN scenario (frames, one question, an answer) at a held cache length (Figs. 4b and 14),
    and of its prefill alone."""
    machine, way, model = platforms.get(platform), methods.get(method), models.get(PAPER_MODEL)
    prefill = COIN_FRAMES * predict(machine, way, frame(model, cache), parameters).latency
    prefill += predict(machine, way, question(model, cache, 1, COIN_QUESTION), parameters).latency
    return prefill + COIN_ANSWER * predict(machine, way, token(model, cache), parameters).latency, prefill


BASE = {"vrex8": "agx-orin", "vrex48": "a100"}
"""The GPU beside which the paper puts each V-Rex."""

Machine = tuple[str, str]
"""Names of a platform and of a method on it."""

EDGE_BASE, EDGE_OURS = ("agx-orin", "flexgen"), ("vrex8", "resv-dre")


def _value(
    of: str, machine: Machine, kind: str = "frame", cache: int = 40_000, batch: int = 1, scale: float = 1
) -> Figure:
    """A field of ``Prediction``."""
    return lambda p: scale * float(getattr(run(*machine, kind, cache, batch, p), of))


def _gain(base: Machine, ours: Machine, of: str = "latency", **step: Any) -> Figure:
    """A field of ``base`` over that of ``ours``."""
    above, below = _value(of, base, **step), _value(of, ours, **step)
    return lambda p: above(p) / below(p)


def _extreme(pick: Callable[[Iterable[float]], float], figures: Iterable[Figure]) -> Figure:
    """The smallest or largest of several."""
    known = list(figures)
    return lambda p: pick(figure(p) for figure in known)


def _share(part: str, machine: Machine, cache: int) -> Figure:
    """Percent of a frame's latency."""
    value, whole = _value(part, machine, cache=cache, scale=100), _value("latency", machine, cache=cache)
    return lambda p: value(p) / whole(p)


def _budget(part: str) -> Figure:
    """Percent of a frame's latency on an A100 where InfiniGen's selection fetches 10K of 40K tokens (Fig. 4c)."""

    def percent(p: Parameters) -> float:
        method = replace(methods.get("infinigenp"), frame=0.25)
        found = predict(platforms.get("a100"), method, frame(models.get(PAPER_MODEL), 40_000), p)
        return 100 * float(getattr(found, part)) / found.latency

    return percent


def _coin(cache: int) -> Figure:
    """V-Rex8 over the best software on AGX Orin in the average scenario."""

    def gain(p: Parameters) -> float:
        software = min(end_to_end("agx-orin", method, cache, p)[0] for method in ("flexgen", "infinigenp", "rekv"))
        return software / end_to_end(*EDGE_OURS, cache, p)[0]

    return gain


def _prefill_percent(p: Parameters) -> float:
    whole, prefill = end_to_end("a100", "infinigen", 80_000, p)
    return 100 * prefill / whole


EDGE, SERVER, FIG_16 = "Fig. 13a, VI.B", "Fig. 13b, VI.B", "Fig. 16, VI.B"
FIG_4B, FIG_4C = "Fig. 4b, III.A", "Fig. 4c, III.B"
FIG_14, FIG_15, FIG_18 = "Fig. 14, VI.B", "Fig. 15, VI.B", "Fig. 18, VI.D"
GAINS = {"latency": "speed-up", "energy": "energy gain"}

RANGES = (
    # V-Rex over FlexGen on its GPU: stage, batch, smallest and largest over the sizes, of what, calibrated.
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
    # Gain over AGX Orin with FlexGen, of what, calibrated. The last is also the largest energy gain of Fig. 13a.
    ("agx-orin", "resv", 2.8, "latency", True),
    ("vrex8", "resv-kvpu", 6.0, "latency", True),
    ("vrex8", "resv-dre", 8.1, "latency", True),
    ("vrex8", "resv-kvpu", 9.2, "energy", False),
    ("vrex8", "resv-dre", 10.2, "energy", True),
)


_TOPS = [_value("tops_per_watt", ("vrex48", "resv-dre"), cache=cache, batch=8) for cache in SIZES]
_RESV, _KVPU, _A100 = ("agx-orin", "resv"), ("vrex8", "resv-kvpu"), ("a100", "infinigen")
_COINS = [_coin(cache) for cache in SIZES]
_ROOF, _ROOF_REKV = (_gain(EDGE_BASE, ours, batch=4) for ours in (EDGE_OURS, ("agx-orin", "rekv")))
_RESIDENT = _gain(("agx-orin", "resident"), EDGE_OURS, cache=1_000)

OTHERS: tuple[tuple[str, str, str, float, bool, Figure], ...] = (
    ("abstract", "vrex8, frame, 1K", "FPS", 8.3, True, _value("per_second", EDGE_OURS, cache=1_000)),
    ("abstract", "vrex8, frame, 40K", "FPS", 3.9, True, _value("per_second", EDGE_OURS)),
    (SERVER, "vrex48, frame, batch 8, least", "TOPS/W", 1.1, False, _extreme(min, _TOPS)),
    (SERVER, "vrex48, frame, batch 8, most", "TOPS/W", 1.4, False, _extreme(max, _TOPS)),
    (FIG_16, "agx-orin + resv, 40K: selection in latency", "%", 48, True, _share("selection", _RESV, 40_000)),
    (FIG_16, "vrex8 + resv-kvpu, 40K: selection in latency", "%", 0.5, False, _share("selection", _KVPU, 40_000)),
    (FIG_4C, "a100, InfiniGen, 10K of 40K: selection", "%", 40, True, _budget("selection")),
    (FIG_4C, "a100, InfiniGen, 10K of 40K: fetch", "%", 39, True, _budget("exposed_fetch")),
    (FIG_4B, "a100 + infinigen, 80K: prefill in COIN", "%", 83, False, _prefill_percent),
    (FIG_4B, "a100 + infinigen, 80K: fetch in prefill", "%", 74, False, _share("exposed_fetch", _A100, 80_000)),
    (FIG_14, "vrex8 over the best of agx-orin, COIN: largest speed-up", "×", 5.4, False, _extreme(max, _COINS)),
    (FIG_15, "vrex8 over agx-orin, all on the device, 1K: speed-up", "×", 1.5, False, _RESIDENT),
    (FIG_18, "vrex8 over agx-orin + flexgen, 40K, batch 4: throughput", "×", 10.8, False, _ROOF),
    (FIG_18, "agx-orin + rekv over flexgen, 40K, batch 4: throughput", "×", 15 / 6.6, False, _ROOF_REKV),
)


def _references() -> Iterator[Reference]:
    for where, name, kind, cache, ms in LATENCIES:
        latency = _value("latency", (name, "resv-dre"), kind, cache, scale=1000)
        yield Reference(where, f"{name}, {kind}, {cache // 1000}K", "ms", ms, True, latency)
    for where, name, kind, batch, low, high, of, calibrated in RANGES:
        machines = (BASE[name], "flexgen"), (name, "resv-dre")
        gains = [_gain(*machines, of, kind=kind, cache=cache, batch=batch) for cache in SIZES]
        what = f"{name} over {BASE[name]} + flexgen, {kind}, batch {batch}: {GAINS[of]}"
        yield Reference(where, f"{what}, smallest", "×", low, calibrated, _extreme(min, gains))
        yield Reference(where, f"{what}, largest", "×", high, calibrated, _extreme(max, gains))
    for name, method, paper, of, calibrated in ABLATION:
        what = f"{name} + {method} over agx-orin + flexgen, 40K: {GAINS[of]}"
        yield Reference(FIG_16, what, "×", paper, calibrated, _gain(EDGE_BASE, (name, method), of))
    for row in OTHERS:
        yield Reference(*row)


REFERENCES = list(_references())
