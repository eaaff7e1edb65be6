"""Measures the engine's speed on a device: ceilings, achieved shares of them, windows, streams.

Runs the production engine over one model with random weights; cameras are copies of one clip. GPU times are taken after
synchronizing. Tests run the same code on a CPU with a small preset.
"""

import gc
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cluster.codec.nvdec import NvdecError, shared_nvdec
from cluster.codec.processor import CodecOptions
from cluster.engine.base import Engine
from cluster.engine.native import NativeEngine
from cluster.engine.native.graphed_decode import DecodeStep
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.stream import StreamFrame
from cluster.errors import CapacityError, ConfigError
from cluster.lab.bench.engines import start_vllm
from cluster.lab.bench.frames import prune_clip, read_clip
from cluster.lab.bench.gpu_frontend import DecodeLoad, decode_rates, host_nvdec
from cluster.lab.bench.gpu_host import SPEC, STRIDE_S, WINDOW_S, admit_cameras, push_all
from cluster.lab.bench.harness import BenchResult, Goals, print_progress
from cluster.lab.bench.window import Measured
from cluster.lab.report.compare import push_window
from cluster.lab.scenes.street_clips import make_clip
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model, load_random_shape
from cluster.models.presets import SHAPES
from cluster.types import MICROSECONDS, FrameSample, StreamSpec, WindowRequest

GOALS: Goals = {
    "prefill_mfu": (">=", 0.60),
    "tower_mfu": (">=", 0.45),
    "window_speedup": (">=", 8.0),
    "streams_per_gpu": (">=", 200.0),
    "host_loads_hidden": (">=", 0.9),
    "graphed_decode_speedup": (">=", 1.0),
    "graphed_decode_share": (">=", 1.0),
}
REPEATS = 5
SUSTAINED_S = 2.0
# Cameras per step, and windows per camera after the first.
STEP, WINDOWS = 8, 3
# Trials of a search for how many cameras fit into a stride.
TRIES = 4


def release_memory(device: torch.device) -> None:
    """Free the memory of unused engines, which are part of reference cycles, and the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Rig:
    """A model on a device, and a clip's frames as cameras send them, in full and pruned."""

    def __init__(self, model: str, device: torch.device, clip: Path | None, *, streams: int) -> None:
        """``clip``: None for a generated one; ``streams``: maximum cameras to try."""
        self.device = device
        self.model = load_measured(model, device)
        self.streams = streams
        seconds = WINDOW_S + WINDOWS * STRIDE_S
        with tempfile.TemporaryDirectory() as folder:
            if clip is None:
                clip = Path(folder) / "street.mp4"
                make_clip("street", clip, seconds=seconds)
            # Production spreads the cameras over the strides of an anchor interval.
            first, second = (
                read_clip(clip, self.model.geometry, at_least=seconds, at_most=seconds, options=options)
                for options in (CodecOptions(), CodecOptions(first_interval_s=STRIDE_S))
            )
        clips = ((first, "none"), (first, "replenish"), (second, "replenish"))
        self.full, self.ours, self.others = (prune_clip(each, SPEC.stream, policy).samples for each, policy in clips)
        self.gemm = 0.0
        # Mean over the steps measured last.
        self.clock_mhz: float | None = None

    def seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of a call."""
        times = []
        for _ in range(REPEATS + 1):
            self.wait()
            began = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _clock_mhz(self) -> float | None:
        """SM clock, which drops at power or thermal limits; None if unavailable."""
        # NVML raises its own exception types, and may not be installed.
        with suppress(Exception):
            return float(torch.cuda.clock_rate(self.device)) if self.device.type == "cuda" else None
        return None

    def engine(self, **options: Any) -> NativeEngine:
        """Create an engine after freeing the memory of previous ones for its pool."""
        release_memory(self.device)
        return NativeEngine(self.model, **options)

    # -- parts -------------------------------------------------------------------------------------
    def ceilings(self) -> BenchResult:
        """Ceilings of the device: matrix products, copies on it, and copies between it and the host."""
        size, count = (8192, 2**29) if self.device.type == "cuda" else (1024, 2**24)
        a, b = (torch.randn(size, size, device=self.device, dtype=self.model.dtype) for _ in range(2))
        self.gemm = 2 * size**3 / self._sustained(lambda: a @ b)
        source = torch.zeros(count, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        rows = [
            {"ceiling": "GEMM, TFLOP/s", "measured": self.gemm / 1e12},
            {"ceiling": "copy, GB/s read and written", "measured": self._copy_rate(source, target, 2)},
        ]
        if self.device.type == "cuda":
            host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
            rows += [
                {"ceiling": "to the device, GB/s", "measured": self._copy_rate(host, target, 1)},
                {"ceiling": "to the host, GB/s", "measured": self._copy_rate(source, host, 1)},
            ]
        return BenchResult({}, rows)

    def _sustained(self, call: Callable[[], object]) -> float:
        """Mean seconds of a call, repeated for ``SUSTAINED_S``: a GPU that was idle is faster until it reaches its
        power limit."""
        one = self.seconds(call)
        count = max(1, round(SUSTAINED_S / one))
        began = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - began) / count

    def _copy_rate(self, source: torch.Tensor, target: torch.Tensor, times: int) -> float:
        return times * source.nbytes / self.seconds(lambda: target.copy_(source, non_blocking=True)) / 1e9

    def windows(self) -> BenchResult:
        """Full and our windows with several cameras per step, and the share of the ceiling that each stage reaches."""
        rows: list[dict[str, Any]] = []
        found: list[Measured] = []
        for name, samples in (("full", self.full), ("ours", self.ours)):
            each = self.measure(samples, from_scratch=name == "full")
            row = {
                "windows": name,
                "seconds": each.window_s,
                # Timings of a step cover all its cameras.
                "tower_s": each.mean(lambda window: window.timing.vision_s) / STEP,
                "llm_s": each.mean(lambda window: window.timing.llm_s) / STEP,
                "tower_gflop": each.mean(lambda window: window.tower_flops) / 1e9,
                "llm_gflop": each.mean(lambda window: window.llm_flops) / 1e9,
                "clock_mhz": self.clock_mhz,
            }
            found.append(each)
            rows.append(row)
        full, ours = found
        figures = {"window_speedup": full.window_s / ours.window_s}
        if self.gemm:
            figures["prefill_mfu"] = 1e9 * rows[0]["llm_gflop"] / rows[0]["llm_s"] / self.gemm
            figures["tower_mfu"] = 1e9 * rows[0]["tower_gflop"] / rows[0]["tower_s"] / self.gemm
        return BenchResult(
            figures, rows, [f"{STEP} cameras a step; shares are of {self.gemm / 1e12:.4g} TFLOP/s, in full windows"]
        )

    def host_loads(self) -> BenchResult:
        """Share of the load time of windows kept in host memory between strides that does not lengthen their steps."""
        stays, moves = (self.measure(self.ours, idle_kv_share=share, host_kv_bytes=2**34) for share in (1.0, 0.0))
        held = torch.empty(self._window_bytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        target = held.to(self.device, copy=True)
        load_s = self.seconds(lambda: target.copy_(held, non_blocking=True))
        shown = max(0.0, moves.window_s - stays.window_s)
        row = {"in the pool, s": stays.window_s, "from host memory, s": moves.window_s, "load, s": load_s}
        return BenchResult({"host_loads_hidden": 1 - min(1.0, shown / load_s)}, [row])

    def _window_bytes(self) -> int:
        """Device bytes of one camera's last window."""
        engine = self.engine()
        [spec] = admit_cameras(engine, SPEC, 1, patient=True)
        for sample in self.ours:
            if requests := push_all(engine, [spec], sample):
                engine.step(requests)
        return engine.device_bytes(spec.stream)

    def measure(
        self,
        samples: Sequence[FrameSample],
        *,
        from_scratch: bool = False,
        engine: Engine | None = None,
        refresh: str = SPEC.refresh,
        cameras: int = STEP,
        **options: Any,
    ) -> Measured:
        """Measure the windows after the first of ``cameras`` cameras that send ``samples`` and are stepped together.
        ``from_scratch``: compute every window from scratch. ``engine``: by default the native one with ``options``."""
        engine = engine or self.engine(**options)
        specs = admit_cameras(engine, SPEC, cameras, patient=True, refresh=refresh)
        found = Measured()
        clocks: list[float | None] = []
        for place, sample in enumerate(samples):
            requests = push_all(engine, specs, sample)
            if not requests:
                # Patient cameras have no work ahead, but their windows may leave the pool.
                engine.prefill_ahead()
                continue
            if from_scratch and requests[0].end - samples[0].pts < WINDOW_S * MICROSECONDS:
                # Windows from scratch need no predecessors; the last uncounted one warms up.
                continue
            end = requests[0].end
            if from_scratch:
                requests = _push_from_scratch(engine, specs, samples[: place + 1], requests)
            self.wait()
            began = time.perf_counter()
            answers = engine.step(requests)
            took = time.perf_counter() - began
            if end - samples[0].pts <= WINDOW_S * MICROSECONDS:
                continue
            found.add(engine, took, answers)
            clocks.append(self._clock_mhz())
        self.clock_mhz = None if None in clocks else statistics.fmean(filter(None, clocks))
        return found

    def streams_per_gpu(self) -> BenchResult:
        """Most cameras whose windows, all due at once, are computed within the stride twice in a row; half of the
        cameras open with a new anchor in each."""
        rows: list[dict[str, Any]] = []
        about = round(STRIDE_S / self.measure(self.ours).window_s)
        most = search_streams(partial(self._strides, rows), self.streams, first=about)
        return BenchResult({"streams_per_gpu": float(most)}, rows, [f"at most {self.streams} are tried (--streams)"])

    def _strides(self, rows: list[dict[str, Any]], count: int) -> tuple[float, float]:
        """Seconds of the last two windows of ``count`` cameras, in steps of ``STEP``; infinite if they do not fit."""
        engine = self.engine()
        specs = admit_cameras(engine, SPEC, count, patient=True)
        times = []
        try:
            for both in zip(self.ours, self.others, strict=True):
                self.wait()
                began = time.perf_counter()
                requests = [
                    request
                    for spec, sample in zip(specs, itertools.cycle(both), strict=False)
                    for request in push_all(engine, [spec], sample)
                ]
                steps = [requests[first : first + STEP] for first in range(0, len(requests), STEP)]
                for step, following in itertools.zip_longest(steps, steps[1:], fillvalue=()):
                    engine.step(step, following)
                self.wait()
                if requests:
                    times.append(time.perf_counter() - began)
        except CapacityError as error:
            print_progress(f"gpu: {count} cameras: {error}")
            return math.inf, math.inf
        before, last = times[-2:]
        rows.append({"cameras": count, "first_s": before, "second_s": last, "kv_gib": engine.memory_bytes() / 2**30})
        print_progress(f"gpu: {count} cameras: {before:.2f} and {last:.2f} s of {STRIDE_S:g} s")
        return before, last

    def explanations(self) -> BenchResult:
        """Decoded explanation tokens per second, one camera each per step, launched eagerly and, on a GPU, from CUDA
        graphs. The first window, which captures the graphs, does not count."""
        if self.device.type != "cuda":
            return BenchResult({}, [self._decode_rate(graphs=False)], ["CUDA graphs need a GPU"])
        eager, graphed = (self._decode_rate(graphs=graphs) for graphs in (False, True))
        figures = {
            "graphed_decode_speedup": graphed["tokens_s"] / eager["tokens_s"],
            "graphed_decode_share": graphed["replayed"] / (graphed["replayed"] + graphed["eager"]),
        }
        return BenchResult(figures, [eager, graphed])

    def _decode_rate(self, *, graphs: bool) -> dict[str, Any]:
        engine = self.engine(max_new_tokens=32)
        decode, counted = engine.decode, [0, 0.0]
        if not graphs:
            decode.capture = None

        def timed(step: DecodeStep) -> torch.Tensor:
            self.wait()
            began = time.perf_counter()
            chosen = decode(step)
            self.wait()
            counted[0] += len(step.ids)
            counted[1] += time.perf_counter() - began
            return chosen

        specs = admit_cameras(engine, SPEC, STEP, questions=(replace(SPEC.questions[0], explain=True),))
        for sample in self.ours:
            if requests := push_all(engine, specs, sample):
                engine.step(requests)
                engine.decode = timed  # type: ignore[assignment]
        tokens_s = counted[0] / counted[1] if counted[0] else math.nan
        name = "CUDA graphs" if graphs else "one by one"
        return {"decoding": name, "tokens_s": tokens_s, "replayed": decode.replayed, "eager": decode.eager}

    def library(self) -> BenchResult:
        """Full computation of one window at a time by transformers and by our engine."""
        samples = [sample for sample in self.full if sample.pts < self.full[0].pts + WINDOW_S * MICROSECONDS]
        frames = [StreamFrame.of(sample, time_s=(sample.pts - samples[0].pts) / MICROSECONDS) for sample in samples]
        batches, times = patch_batches(frames), [frame.time_s for frame in frames]
        question = SPEC.questions[0].text
        theirs = self.seconds(lambda: self.model.reference_logits(batches, times, question))
        ours = self.measure(self.full, from_scratch=True, cameras=1).window_s
        rows = [
            {"full window": name, "windows a step": 1, "seconds": seconds}
            for name, seconds in (("transformers", theirs), ("ours", ours))
        ]
        return BenchResult({"library_speedup": theirs / ours}, rows)

    def vllm(self) -> BenchResult:
        """Full windows on vLLM, every frame encoded once, against ours; or why vLLM is unavailable."""
        from cluster.engine.vllm.settings import check_version

        try:
            check_version()
        except ConfigError as error:
            return BenchResult({}, [{"windows": "vLLM, full", "why": str(error)}])
        # vLLM's weights and KV share the GPU with this model.
        arguments = {"gpu_memory_utilization": 0.5} if self.device.type == "cuda" else {}
        with start_vllm(self.model, **arguments) as engine:
            theirs = self.measure(self.full, engine=engine, refresh="all").window_s
        ours = self.measure(self.ours).window_s
        rows = [{"windows": "vLLM, full", "seconds": theirs}, {"windows": "ours", "seconds": ours}]
        return BenchResult({"speedup_over_vllm": theirs / ours}, rows)

    def nvdec(self) -> BenchResult:
        """1080p pictures per second through NVDEC and the decoder's front end, or why there is none. In tests, a CPU
        with small pictures stands in for NVDEC."""
        if self.device.type != "cuda":
            found = decode_rates(host_nvdec(), DecodeLoad((320, 180), clip_s=2.0, run_s=1.0, most=2))
            return replace(found, figures={}, notes=["pictures of 320 x 180, decoded on the CPU"])
        nvdec = shared_nvdec()
        try:
            nvdec.check()
        except NvdecError as error:
            return BenchResult({}, [{"nvdec": "none", "why": str(error)}])
        return decode_rates(nvdec, DecodeLoad())


PARTS: dict[str, Callable[[Rig], BenchResult]] = {
    "ceilings": Rig.ceilings,
    "windows": Rig.windows,
    "host loads": Rig.host_loads,
    "streams": Rig.streams_per_gpu,
    "explanations": Rig.explanations,
    "library": Rig.library,
    "vllm": Rig.vllm,
    "nvdec": Rig.nvdec,
}
"""Parts in order of measurement; ceilings come first."""


def search_streams(strides: Callable[[int], tuple[float, float]], most: int, *, first: int = 1) -> int:
    """Search, in at most ``TRIES`` + 1 trials, for the most cameras (up to ``most``) of which two strides in a row
    are each computed within ``STRIDE_S`` seconds; 0 if none. ``strides``: seconds of both for a number
    of cameras; ``first``: number to try first."""
    stable, unstable, count = 0, most + 1, min(max(first, 1), most)
    for _ in range(TRIES + 1):
        seconds = max(strides(count))
        if seconds <= STRIDE_S:
            stable = count
        else:
            unstable = count
        if unstable - stable <= 1:
            break
        # Scale proportionally, with some margin, within the known bounds.
        count = min(max(round(0.97 * count * STRIDE_S / seconds), stable + 1), unstable - 1)
    return stable


def _push_from_scratch(
    engine: Engine,
    specs: Sequence[StreamSpec],
    samples: Sequence[FrameSample],
    windows: Sequence[WindowRequest],
) -> list[WindowRequest]:
    """Push these windows again, one per camera, with all earlier state evicted."""
    requests: list[WindowRequest] = []
    for spec, window in zip(specs, windows, strict=True):
        engine.evict(spec.stream)
        requests.append(push_window(engine, spec, samples, window))
        # Admit the camera for its next window, one stride later.
        engine.admit(spec)
    return requests


def load_measured(name: str, device: torch.device, layers: int | None = None) -> VisionLanguageModel:
    """Load a published shape with random weights, limited to ``layers``, or a whole preset or checkpoint."""
    if name in SHAPES:
        return load_random_shape(name, device, layers)
    return load_model(name, device=str(device), dtype="bfloat16" if device.type == "cuda" else "float32")
