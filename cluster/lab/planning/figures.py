"""The paper's own numbers, each with its place, what the model says instead, and whether a parameter was set on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Reference:
    """``paper``: the number as printed, in ``unit``. ``calibrated``: parameters were set on it, so that only the other
    ones are predictions. ``batch`` of one unless ``what`` says otherwise."""

    where: str
    what: str
    unit: str
    paper: float
    calibrated: bool
    model: Callable[[Parameters], float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A reference and what the model predicts for it."""

    reference: Reference
    model: float

    @property
    def error(self) -> float:
        """``model / paper - 1``."""
        return self.model / self.reference.paper - 1


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


def _latency(platform: str, kind: str, cache: int) -> Callable[[Parameters], float]:
    return lambda p: 1000 * run(platform, "resv-dre", kind, cache, 1, p).latency


def _gain(
    platform: str, kind: str, batch: int, pick: Callable[[list[float]], float], *, energy: bool = False
) -> Callable[[Parameters], float]:
    """FlexGen on the GPU over V-Rex, the smallest or largest over ``SIZES``."""

    def ratio(p: Parameters) -> float:
        found = []
        for cache in SIZES:
            ours = run(platform, "resv-dre", kind, cache, batch, p)
            base = run(BASE[platform], "flexgen", kind, cache, batch, p)
            found.append(base.energy / ours.energy if energy else base.latency / ours.latency)
        return pick(found)

    return ratio


def _ablation(platform: str, method: str, *, energy: bool = False) -> Callable[[Parameters], float]:
    """Fig. 16: AGX Orin with FlexGen over this one, 40K, batch 1."""

    def ratio(p: Parameters) -> float:
        base, ours = (run(*pair, "frame", 40_000, 1, p) for pair in (("agx-orin", "flexgen"), (platform, method)))
        return base.energy / ours.energy if energy else base.latency / ours.latency

    return ratio


EDGE, SERVER = "Fig. 13a, VI.B", "Fig. 13b, VI.B"

RANGES = (
    # V-Rex over FlexGen on its GPU: stage, batch, smallest and largest over the sizes, of energy, calibrated.
    (EDGE, "vrex8", "frame", 1, 2.2, 7.3, False, True),
    (EDGE, "vrex8", "frame", 4, 2.1, 13.8, False, False),
    (EDGE, "vrex8", "token", 1, 1.9, 15.1, False, True),
    (SERVER, "vrex48", "frame", 1, 2.6, 7.3, False, True),
    (SERVER, "vrex48", "frame", 8, 3.4, 19.7, False, False),
    (SERVER, "vrex48", "token", 1, 2.8, 16.8, False, True),
    (EDGE, "vrex8", "frame", 1, 5.5, 10.2, True, True),
    (EDGE, "vrex8", "frame", 4, 3.1, 12.8, True, False),
    (EDGE, "vrex8", "token", 1, 4.3, 18.5, True, False),
    (SERVER, "vrex48", "frame", 1, 9.0, 29.7, True, False),
    (SERVER, "vrex48", "frame", 8, 5.9, 52.2, True, False),
    (SERVER, "vrex48", "token", 1, 13.2, 70.6, True, False),
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
    # Gain over AGX Orin with FlexGen, of energy, calibrated. The last is also the largest energy gain of Fig. 13a.
    ("agx-orin", "resv", 2.8, False, True),
    ("vrex8", "resv-kvpu", 6.0, False, True),
    ("vrex8", "resv-dre", 8.1, False, True),
    ("vrex8", "resv-kvpu", 9.2, True, False),
    ("vrex8", "resv-dre", 10.2, True, True),
)


def _references() -> list[Reference]:
    found = [
        Reference(where, f"{name}, {kind}, {cache // 1000}K", "ms", ms, True, _latency(name, kind, cache))
        for where, name, kind, cache, ms in LATENCIES
    ]
    for cache, fps in ((1_000, 8.3), (40_000, 3.9)):
        found.append(Reference("abstract", f"vrex8, frame, {cache // 1000}K", "FPS", fps, True, _fps("vrex8", cache)))
    for where, name, kind, batch, low, high, energy, calibrated in RANGES:
        what = f"{name} over {BASE[name]} + flexgen, {kind}, batch {batch}: {'energy gain' if energy else 'speed-up'}"
        for word, paper, pick in (("smallest", low, min), ("largest", high, max)):
            gain = _gain(name, kind, batch, pick, energy=energy)
            found.append(Reference(where, f"{what}, {word}", "×", paper, calibrated, gain))
    for word, paper, pick in (("least", 1.1, min), ("most", 1.4, max)):
        what = f"vrex48, frame, batch 8, {word}"
        found.append(Reference(SERVER, what, "TOPS/W", paper, False, _tops_per_watt(pick)))
    for name, method, paper, energy, calibrated in ABLATION:
        what = f"{name} + {method} over agx-orin + flexgen, 40K: {'energy gain' if energy else 'speed-up'}"
        found.append(Reference("Fig. 16, VI.B", what, "×", paper, calibrated, _ablation(name, method, energy=energy)))
    shares = (
        (
            "Fig. 16, VI.B",
            "agx-orin + resv, 40K: selection in latency",
            48,
            True,
            _share("agx-orin", "resv", 40_000, _selection),
        ),
        (
            "Fig. 16, VI.B",
            "vrex8 + resv-kvpu, 40K: selection in latency",
            0.5,
            False,
            _share("vrex8", "resv-kvpu", 40_000, _selection),
        ),
        ("Fig. 4c, III.B", "a100, InfiniGen, 10K of 40K: selection", 40, True, _budget(_selection)),
        ("Fig. 4c, III.B", "a100, InfiniGen, 10K of 40K: fetch", 39, True, _budget(_fetch)),
        ("Fig. 4b, III.A", "a100 + infinigen, 80K: prefill in COIN", 83, False, _prefill_percent),
        (
            "Fig. 4b, III.A",
            "a100 + infinigen, 80K: fetch in prefill",
            74,
            False,
            _share("a100", "infinigen", 80_000, _fetch),
        ),
    )
    gains = (
        ("Fig. 14, VI.B", "vrex8 over the best of agx-orin, COIN: largest speed-up", 5.4, _coin),
        ("Fig. 15, VI.B", "vrex8 over agx-orin, all on the device, 1K: speed-up", 1.5, _resident),
        ("Fig. 18, VI.D", "vrex8 over agx-orin + flexgen, 40K, batch 4: throughput", 10.8, _roof),
        ("Fig. 18, VI.D", "agx-orin + rekv over flexgen, 40K, batch 4: throughput", 15 / 6.6, _roof_rekv),
    )
    found += [Reference(where, what, "%", paper, calibrated, value) for where, what, paper, calibrated, value in shares]
    return found + [Reference(where, what, "×", paper, False, value) for where, what, paper, value in gains]


def _fps(platform: str, cache: int) -> Callable[[Parameters], float]:
    return lambda p: run(platform, "resv-dre", "frame", cache, 1, p).per_second


def _tops_per_watt(pick: Callable[[list[float]], float]) -> Callable[[Parameters], float]:
    return lambda p: pick([run("vrex48", "resv-dre", "frame", cache, 8, p).tops_per_watt for cache in SIZES])


def _selection(found: Prediction) -> float:
    return 100 * found.selection / found.latency


def _fetch(found: Prediction) -> float:
    return 100 * found.exposed_fetch / found.latency


def _share(
    platform: str, method: str, cache: int, pick: Callable[[Prediction], float]
) -> Callable[[Parameters], float]:
    """Percent of a frame's latency."""
    return lambda p: pick(run(platform, method, "frame", cache, 1, p))


def _coin(p: Parameters) -> float:
    found = []
    for cache in SIZES:
        software = min(end_to_end("agx-orin", method, cache, p)[0] for method in ("flexgen", "infinigenp", "rekv"))
        found.append(software / end_to_end("vrex8", "resv-dre", cache, p)[0])
    return max(found)


def _budget(pick: Callable[[Prediction], float]) -> Callable[[Parameters], float]:
    """Percent of a frame's latency on an A100 where InfiniGen's selection fetches 10K of 40K tokens (Fig. 4c)."""

    def percent(p: Parameters) -> float:
        method = replace(methods.get("infinigenp"), frame=0.25)
        return pick(predict(platforms.get("a100"), method, frame(models.get(PAPER_MODEL), 40_000), p))

    return percent


def _resident(p: Parameters) -> float:
    return run("agx-orin", "resident", "frame", 1_000, 1, p).latency / _latency("vrex8", "frame", 1_000)(p) * 1000


def _roof(p: Parameters) -> float:
    pairs = (("agx-orin", "flexgen"), ("vrex8", "resv-dre"))
    base, ours = (run(*pair, "frame", 40_000, 4, p).latency for pair in pairs)
    return base / ours


def _roof_rekv(p: Parameters) -> float:
    base, ours = (run("agx-orin", method, "frame", 40_000, 4, p).latency for method in ("flexgen", "rekv"))
    return base / ours


def _prefill_percent(p: Parameters) -> float:
    whole, prefill = end_to_end("a100", "infinigen", 80_000, p)
    return 100 * prefill / whole


REFERENCES: list[Reference] = _references()
