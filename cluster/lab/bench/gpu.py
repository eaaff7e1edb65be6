"""Measures the engine on a GPU: ceilings, shares of them, full and our windows, cameras per GPU (``gpu_measure.py``).
``--dry-run``: without a GPU, what does not depend on its speed, at the true size of a 7B model.

Refresh policies, gate, explanations, memories, questions about the past and camera moves run on a fake device
(``fake_cuda.py``) that raises when devices are mixed and counts launches, host reads and copied keys.
"""

import argparse
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self
from unittest import mock

import torch
from torch import Tensor

from cluster.engine.native import NativeEngine
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.stream import StreamFrame
from cluster.errors import ConfigError
from cluster.lab.bench import gpu_measure
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.lab.bench.gpu_frontend import compare_clips, summary
from cluster.lab.bench.gpu_host import QUESTION, STRIDE_S, WINDOW_S, camera_samples, host_cost
from cluster.lab.bench.gpu_roofline import predict, predicted_streams
from cluster.lab.bench.harness import BenchResult, Goals, positive, print_progress, run_parts, table
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import find_device, load_truncated
from cluster.registry import refresh_policies
from cluster.types import AskSpec, MemorySpec, StreamSpec, WindowRequest

SHAPES = ("qwen2_5_vl-7b", "internvl3-8b")
PREDICTED = "qwen2_5_vl-7b"
GOALS: Goals = {**gpu_measure.GOALS, "device_faults": ("<=", 0.0)}
_SCENARIOS = "scenarios"
MANY = 64
HOST_STREAMS = 16
SYSTEM_COPIES = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument("--dry-run", action="store_true", help="run on a fake device; needs no GPU")
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), metavar="NAME", help="model shapes (default: both)")
    parser.add_argument(
        "--clip",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="videos for gpu_frontend_equal besides four generated ones, and for the roofline instead of two generated",
    )
    parser.add_argument("--device", default="cuda", help="device to measure; cpu for a trial run")
    parser.add_argument("--model", default=PREDICTED, help="shape or preset to measure")
    parser.add_argument("--part", nargs="+", metavar="NAME", help="measure these parts (default: all)")
    parser.add_argument("--streams", type=positive, default=512, help="maximum cameras to try")
    parser.add_argument("--layers", type=positive, default=4, metavar="N", help="layers to run")


def run(args: argparse.Namespace) -> BenchResult:
    """Figures, each the worst of the shapes: ``device_faults``, ``syncs_per_step``, ``launches_per_layer_64_over_1``,
    ``launches_tower_64_over_1``, ``keys_copied``, ``launches_per_layer_past`` and ``reads_per_layer_past`` (launches
    and host reads when a stride's frames read the past), ``bytes_per_stream`` (in the pool), ``bytes_per_idle_stream``
    (with windows in host memory between strides), ``host_loads_hidden`` (share of their loads started before the step
    that needs them was planned), ``host_ms_per_window``. The worst of the clips: ``gpu_frontend_equal``, and
    ``predicted_streams_h100`` (and ``_fp8``) of Qwen2.5-VL-7B."""
    if not args.dry_run:
        return _measured(args)
    if args.layers < 2:
        raise ConfigError(
            "--layers must be at least 2 with --dry-run: per-layer figures are differences to a run with half of them"
        )
    rows: list[dict[str, Any]] = []
    worst: dict[str, float] = {}
    notes: list[str] = []
    for shape in args.shape:
        with FakeCuda() as cuda:
            rows += [_tried(shape, args.layers, *scenario) for scenario in SCENARIOS.items()]
            for name, value in _count_launches(shape, args.layers, cuda).items():
                # For keys_copied, missing writes are as wrong as extra ones.
                worst[name] = max(worst.get(name, value), value, key=abs)
        print_progress(f"gpu: {shape}: faults and counts")
        cost = host_cost(shape, HOST_STREAMS)
        worst["host_ms_per_window"] = max(worst.get("host_ms_per_window", 0.0), cost.step)
        notes.append(
            f"{shape}: {cost.step:.2f} ms of host time per window, {HOST_STREAMS} cameras a step; with frames computed "
            f"ahead, {cost.end:.2f} ms at its end and {cost.ahead:.2f} ms before"
        )
    compared = compare_clips(args.clip or ())
    predicted = predict(PREDICTED, args.clip or ()) if PREDICTED in args.shape else []
    if predicted:
        print(f"roofline of {PREDICTED}\n{table(predicted)}\n", flush=True)
        worst["predicted_streams_h100"] = predicted_streams(predicted, "H100 SXM", "bf16")
        worst["predicted_streams_h100_fp8"] = predicted_streams(predicted, "H100 SXM", "fp8")
    worst["gpu_frontend_equal"] = min(row["equal"] for row in compared)
    if args.shape:
        worst["host_loads_hidden"] = 1.0 - worst.pop("host_loads_shown")
    figures = {"device_faults": float(sum(bool(row["fault"]) for row in rows)), **worst}
    note = f"fake device, {args.layers} layers of each model at its true width; per layer: the difference to half"
    return BenchResult(figures, [*rows, *predicted], [note, *notes, *map(summary, compared)])


def _measured(args: argparse.Namespace) -> BenchResult:
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU on this machine; use --dry-run or --device cpu")
    device = find_device(args.device)
    known = (*gpu_measure.PARTS, _SCENARIOS)
    if unknown := set(args.part or ()) - set(known):
        raise ConfigError(f"there is no part {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    rig = gpu_measure.Rig(args.model, device, args.clip and args.clip[0], streams=args.streams)
    parts: dict[str, Callable[[], BenchResult]] = {name: partial(part, rig) for name, part in gpu_measure.PARTS.items()}
    parts[_SCENARIOS] = partial(_measure_scenarios, args.model, args.layers, device)
    # Other parts report shares of the measured ceilings.
    chosen = {name: part for name, part in parts.items() if name == "ceilings" or name in (args.part or known)}
    return run_parts(chosen, GOALS)


def _measure_scenarios(model: str, layers: int, device: torch.device) -> BenchResult:
    """Run the dry run's scenarios on a real device."""
    rows = []
    with mock.patch.object(Rig, "loaded", gpu_measure.load_measured(model, device, layers)):
        for name, scenario in SCENARIOS.items():
            gpu_measure.release_memory(device)
            rows.append(_tried(model, layers, name, scenario))
    return BenchResult({"device_faults": float(sum(bool(row["fault"]) for row in rows))}, rows)


# -- scenarios -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Rig:
    """An engine with cameras that answer a window of ``window_s`` every stride."""

    engine: NativeEngine
    model: VisionLanguageModel
    # The model of all scenarios; None: one on the fake device for each.
    loaded: ClassVar[VisionLanguageModel | None] = None

    @classmethod
    def of(cls, shape: str, layers: int, *, memory: bool = False, **options: Any) -> Self:
        model = cls.loaded or load_truncated(shape, layers, DEVICE)
        # The lower tier stands for one that other processes can read, which handing over a window requires.
        bank = MemoryBank(TierStack([Arena(2**26), Arena(2**31, name="node", evicts=False)])) if memory else None
        return cls(NativeEngine(model, memories=bank, max_new_tokens=4, **options), model)

    def spec(self, name: str, **options: Any) -> StreamSpec:
        standard: dict[str, Any] = {"questions": (QUESTION,), "window_s": WINDOW_S, "stride_s": STRIDE_S}
        return StreamSpec(name, **{"static_gate": False, **standard, **options})

    def next_windows(self, names: Sequence[str]) -> list[WindowRequest]:
        """The next window of each camera; all cameras have the same history."""
        *before, last = camera_samples(self.model.geometry)
        first, *others = names
        self.engine.admit(self.spec(first))
        for sample in before:
            for request in self.engine.push(replace(sample, stream=first)):
                self.engine.step([request])
        state = self.engine.export_stream(first) if others else b""
        for name in others:
            self.engine.import_stream(self.spec(name), state)
        return [request for name in names for request in self.engine.push(replace(last, stream=name))]

    def drive(
        self,
        *names: str,
        still: bool = False,
        ahead: bool = False,
        between: Callable[[], object] = lambda: None,
        **spec: Any,
    ) -> None:
        """Answer all windows of these cameras (one by default), which all send the same; the oldest frames have left
        the last window. ``ahead``: compute frames ahead as they arrive; ``between``: called after each step."""
        names = names or ("camera",)
        for name in names:
            self.engine.admit(self.spec(name, **spec))
        for sample in camera_samples(self.model.geometry, still):
            for name in names:
                for request in self.engine.push(replace(sample, stream=name)):
                    self.engine.step([request])
                    between()
            while ahead and self.engine.prefill_ahead():
                pass


def _drive_scenario(**spec: Any) -> Callable[[str, int], None]:
    return lambda shape, layers: Rig.of(shape, layers).drive(**spec)


def _explain_captured(shape: str, layers: int) -> None:
    """Three explanations at a time from CUDA graphs, whose capture allows no host reads or uploads; skipped on a CPU.
    Raises ``RuntimeError`` if a step was not replayed."""
    rig = Rig.of(shape, layers)
    if FakeCuda.current is not None:
        rig.engine.decode.capture = FakeCuda.current.capture
    if rig.engine.decode.capture is None:
        return
    rig.drive(questions=(*(replace(QUESTION, id=f"why {i}", explain=True) for i in range(3)), QUESTION))
    replayed, eager = rig.engine.decode.replayed, rig.engine.decode.eager
    if eager or not replayed:
        raise RuntimeError(f"{eager} of {eager + replayed} decode steps were not replayed")


def _remember(shape: str, layers: int, **memory: Any) -> Rig:
    """Write frames that leave the window to the memory. Raises ``RuntimeError`` if a write failed; the writer thread
    only logs why."""
    rig = Rig.of(shape, layers, memory=True)
    # Clustering runs on the host with any organiser; this one does not read the keys.
    # A block holds what leaves in two strides at one frame per second.
    standard = {"organiser": "frames", "cap_bytes": 2**28, "block_frames": round(2 * STRIDE_S)}
    rig.drive(memory=MemorySpec(**{**standard, **memory}))
    assert rig.engine.memories is not None
    written = rig.engine.memories.wait_written()
    counts = rig.engine.memories.get_memory("camera")[0].counts
    if not written or not counts.settled or counts.frames_dropped:
        raise RuntimeError(f"{counts.settled} writes to the memory, {counts.frames_dropped} frames dropped")
    return rig


def _ask(shape: str, layers: int) -> None:
    """Ask about the past when some of the frames that left the window are clustered and others still wait."""
    asking = _remember(shape, layers, block_frames=round(3 * STRIDE_S)).engine.ask(
        AskSpec("camera", "Who came?", max_new_tokens=2)
    )
    while asking.step() is not None:
        pass


def _read_past(shape: str, layers: int, cuda: FakeCuda | None = None) -> tuple[int, int]:
    """New frames retrieve what left their window. Returns kernel launches and host reads of the last window. Raises
    ``RuntimeError`` if no cluster was read."""
    rig = Rig.of(shape, layers, memory=True)
    # Keys that the host reads are noise: one cluster takes all of them.
    memory = MemorySpec(
        organiser_options={"threshold": 32},
        cap_bytes=2**28,
        block_frames=4,
        frame_retrieval="resv",
        frame_retrieval_options={"deadline_s": 60.0},
    )
    rig.engine.admit(rig.spec("camera", memory=memory, window_s=4 * STRIDE_S, refresh="none"))
    bank = rig.engine.memories
    assert bank is not None
    counted = 0, 0
    written = True
    for sample in camera_samples(rig.model.geometry):
        for request in rig.engine.push(replace(sample, stream="camera")):
            written = written and bank.wait_written()
            # Block the memory's threads until the step is counted.
            with bank.get_memory("camera")[0].exclusive:
                if cuda is not None:
                    cuda.reset()
                rig.engine.step([request])
                if cuda is not None:
                    counted = sum(cuda.launches.values()), cuda.syncs
    written = written and bank.wait_written()
    [window] = rig.engine.stats.windows
    dropped = bank.get_memory("camera")[0].counts.frames_dropped
    if not written or not window.reads.clusters or dropped:
        raise RuntimeError(f"{window.reads.clusters} clusters read by frames, {dropped} frames dropped, {written=}")
    return counted


def _move(shape: str, layers: int) -> None:
    rig = Rig.of(shape, layers)
    rig.drive()
    rig.engine.import_stream(StreamSpec("other", (QUESTION,), WINDOW_S, STRIDE_S), rig.engine.export_stream("camera"))


def _hand_over(shape: str, layers: int) -> None:
    """Hand the window over to another process. Raises ``RuntimeError`` if it was not written."""
    # A window may take up to an eighth of the cap.
    if not _remember(shape, layers, cap_bytes=2**31).engine.hand_over("camera").result(60.0):
        raise RuntimeError("the window was not handed over")


def _idle_windows(shape: str, layers: int) -> Rig:
    """Two cameras whose windows stay in host memory between strides, with frames computed ahead."""
    rig = Rig.of(shape, layers, idle_kv_share=0.0)
    rig.drive("camera", "other", ahead=True)
    return rig


def _host_memory(shape: str, layers: int) -> None:
    """Two cameras, each of which is evicted to host memory for the other."""
    rig = Rig.of(shape, layers)
    rig.drive("camera", "other", between=lambda: rig.engine.pool.make_room(rig.engine.pool.capacity))


SCENARIOS: dict[str, Callable[[str, int], Any]] = {
    **{
        f"refresh {name}": _drive_scenario(
            refresh=name, refresh_budget=0.3 if refresh_policies.get(name).budgeted else None
        )
        for name in refresh_policies
    },
    "gate": _drive_scenario(still=True, static_gate=True),
    "explain": _drive_scenario(questions=(replace(QUESTION, id="why", explain=True), QUESTION)),
    "explain, captured": _explain_captured,
    "memory": _remember,
    "ask": _ask,
    "frames read the past": _read_past,
    "export, import": _move,
    "host memory": _host_memory,
    "idle windows": _idle_windows,
    "hand over": _hand_over,
}


def _tried(shape: str, layers: int, name: str, scenario: Callable[[str, int], Any]) -> dict[str, Any]:
    faults = _Faults()
    logging.getLogger("cluster").addHandler(faults)
    try:
        scenario(shape, layers)
    except Exception as error:
        faults.found.append(error)
    finally:
        logging.getLogger("cluster").removeHandler(faults)
    named = [
        f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}" for error in faults.found
    ]
    return {"shape": shape, "scenario": name, "fault": "; ".join(named)}


class _Faults(logging.Handler):
    """Collects errors that engine threads, such as the memory writer, log without raising."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.found.append(record.exc_info[1])


# -- counts ----------------------------------------------------------------------------------------
def _count_launches(shape: str, layers: int, cuda: FakeCuda) -> dict[str, float]:
    found: dict[str, float] = {}
    launches: dict[tuple[int, int], int] = {}
    passes = {}
    for depth, streams in itertools.product((layers // 2, layers), (1, MANY)):
        rig = Rig.of(shape, depth)
        _, _, heads, size = rig.engine.pool.k.shape
        cuda.watch = heads, size
        ran: list[int] = []
        rig.model.run_layer = partial(_run_recorded, rig.model.run_layer, ran)  # type: ignore[method-assign]
        names = [f"camera-{number}" for number in range(streams)]
        requests = rig.next_windows(names)
        cuda.reset()
        ran.clear()
        answers = rig.engine.step(requests)
        launches[depth, streams] = sum(cuda.launches.values())
        passes[streams] = len(ran) // depth
        if (depth, streams) == (layers, 1):
            [tokens] = [answer.tokens for answer in answers]
            computed = tokens.refreshed + tokens.new + tokens.query
            system = len(rig.model.system_ids())
            # Subtract the expected writes of keys and values. Each layer rotates queries and keys as one tensor and
            # writes keys and values. The system prompt's keys are widened, repeated, rotated, narrowed and written; its
            # values are repeated and written.
            found["keys_copied"] = cuda.written / depth - 2 * computed - SYSTEM_COPIES * system
        if depth == layers:
            found["syncs_per_step"] = max(found.get("syncs_per_step", 0.0), float(cuda.syncs))
            found["bytes_per_stream"] = float(max(map(rig.engine.device_bytes, names)))
    # A stride whose frames all read the past, in every layer but the last.
    counted = zip(_read_past(shape, layers + 1, cuda), _read_past(shape, layers, cuda), strict=True)
    found["launches_per_layer_past"], found["reads_per_layer_past"] = (deeper - other for deeper, other in counted)
    idle = _idle_windows(shape, layers).engine
    found["bytes_per_idle_stream"] = float(max(map(idle.device_bytes, ("camera", "other"))))
    found["host_loads_shown"] = 1.0 - idle.idle.loads_ahead / max(1, idle.idle.loads)
    # A step of many cameras takes several passes of bounded size, each of which runs every layer once.
    per_layer = [(launches[layers, n] - launches[layers // 2, n]) / passes[n] for n in (MANY, 1)]
    found["launches_per_layer_64_over_1"] = per_layer[0] / per_layer[1]
    found["launches_tower_64_over_1"] = _tower(rig, cuda, MANY) / _tower(rig, cuda, 1)
    return found


def _run_recorded(run: Callable[..., Tensor], ran: list[int], index: int, *given: Any) -> Tensor:
    ran.append(index)
    return run(index, *given)


def _tower(rig: Rig, cuda: FakeCuda, frames: int) -> int:
    """Kernel launches of the tower for ``frames`` frames."""
    samples = itertools.islice(itertools.cycle(camera_samples(rig.model.geometry)), frames)
    cuda.reset()
    rig.model.encode(patch_batches([StreamFrame.of(sample) for sample in samples]))
    return sum(cuda.launches.values())
