"""Benchmark harness: arguments, result tables, JSON output, machine description.

A bench is a module with ``add_arguments(parser)`` and ``run(args) -> BenchResult``, listed in ``BENCHES`` and imported
on demand. ``sightline bench NAME`` and ``python -m cluster.lab.bench NAME`` run the same code.
"""

import argparse
import functools
import importlib
import logging
import operator
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

from cluster.errors import ConfigError
from cluster.files import check_file_writable, json_text, write_text
from cluster.lab.report.number_format import figure_text

log = logging.getLogger(__name__)

T = TypeVar("T")

BENCHES: dict[str, str] = {
    "window": "full computation against pruned and refreshed windows, same engine, same clips",
    "codec": "the whole front end against bare decoding of the same clip, on one core",
    "families": "logits of every model family against transformers, and with KV reuse against without",
    "ingest": "packets per second pushed through the gateway over gRPC, with flow control",
    "streams": "CPU milliseconds per second of a pushed camera's video, by process",
    "batch": "batched steps of several streams against one step per stream",
    "engines": "the native engine against vLLM, full and pruned, on the same windows",
    "cost": "step times over windows of many sizes, and the cost model fitted to them",
    "scheduler": "placement, queue, ladder and admission in simulated time",
    "memory": "cost and coverage of memory compressors under a cap, on KV that leaves real windows",
    "alerts": "latency from answer to webhook, and alerts lost when processes are killed",
    "dashboards": "every dashboard panel against a running cluster and a real Prometheus; series per camera",
    "console": "the camera wall in a real browser: first paint, and memory growth while it stays open",
    "console_tasks": "user tasks in the console, by pointer and keyboard, on a cluster that starts without cameras",
    "fleet": "latency of a question to every camera's memory, and of a live view in a real browser",
    "faults": "injected faults: positions, gaps, kills, outages, attacks, leaks",
    "fuzz": "malformed input to every gRPC method, HTTP and YAML: no crash, hang or internal error",
    "gpu": "the engine on a GPU; --dry-run counts launches, host reads, copies and faults on a fake one",
    "soak": "memory growth over thousands of windows of one camera",
}

IN_CHECKOUT = {
    "console": "console_bench",
    "console_tasks": "console_tasks",
    "dashboards": "dashboards_bench",
    "fleet": "fleet_bench",
    "fuzz": "fuzz",
    "faults.cluster": "process_faults",
    "faults.decoder": "decoder_bombs",
    "faults.gateway_attacks": "gateway_attacks",
    "faults.secrets": "source_secrets",
}
"""Benches and parts that live in tests/support, which is not installed: name -> module."""

SUPPORT = Path(__file__).resolve().parents[3] / "tests" / "support"


def load_module(name: str) -> ModuleType:
    """Import the module of a bench or of a part of one. Raises ``ConfigError`` if it is in tests/support and this is an
    installed package."""
    if name not in IN_CHECKOUT:
        return importlib.import_module(f"cluster.lab.bench.{name}")
    if not SUPPORT.is_dir():
        raise ConfigError(f"{name} needs a checkout of Sightline's source: it is part of the tests")
    if str(SUPPORT) not in sys.path:
        sys.path.append(str(SUPPORT))
    return importlib.import_module(IN_CHECKOUT[name])


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Result of a bench or of a part of one. ``figures``: name -> ratio, rate or count of this run; ``rows``: the table
    behind them; ``goals``: figures against their goals, printed instead of ``rows`` if not empty."""

    figures: dict[str, float]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self, bench: str) -> dict[str, Any]:
        """The object that ``--json`` writes."""
        return {
            "bench": bench,
            "figures": self.figures,
            **({"goals": self.goals} if self.goals else {}),
            "rows": self.rows,
            "notes": self.notes,
            "machine": machine(),
        }


def machine() -> dict[str, Any]:
    """CPU, cores, memory, GPU and library versions, for comparing runs."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    torch = sys.modules.get("torch")
    found: dict[str, Any] = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(0) if torch is not None and torch.cuda.is_available() else None,
    }
    for package in ("torch", "transformers", "vllm", "av", "grpcio", "ray"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def print_progress(text: str) -> None:
    """Print a progress line to stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as aligned plain text, with a column per key of any row; "" without rows."""
    if not rows:
        return ""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_format_cell(row.get(key)) for key in keys] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in cells)) for i, key in enumerate(keys)]
    lines = ["  ".join(key.ljust(widths[i]) for i, key in enumerate(keys))]
    for line in cells:
        lines.append("  ".join(text.rjust(widths[i]) if i else text.ljust(widths[0]) for i, text in enumerate(line)))
    return "\n".join(line.rstrip() for line in lines)


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


class _DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends defaults to help texts that do not mention one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default is None or action.default is False or action.default == []
        return action.help if unset or "(default" in (action.help or "") else super()._get_help_string(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one bench from the command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    listing = "\n".join(f"  {name:{max(map(len, BENCHES))}}  {what}" for name, what in BENCHES.items())
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: sightline bench NAME [options]\n\n{listing}\n\nOptions of one: sightline bench NAME --help")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in BENCHES:
        raise ConfigError(f"unknown bench {name!r}; there are: {', '.join(BENCHES)}")
    module = load_module(name)
    parser = argparse.ArgumentParser(
        prog=f"sightline bench {name}", description=module.__doc__, formatter_class=_DefaultsFormatter
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write figures, rows and machine as JSON; - for stdout"
    )
    module.add_arguments(parser)
    args = parser.parse_args(rest)
    # With JSON on stdout, tables go to stderr.
    json_to_stdout = args.json == Path("-")
    if args.json is not None and not json_to_stdout:
        check_file_writable(args.json)
    if getattr(args, "threads", None):
        importlib.import_module("torch").set_num_threads(args.threads)
    with redirect_stdout(sys.stderr) if json_to_stdout else nullcontext():
        result: BenchResult = module.run(args)
        print(table(result.goals or result.rows))
        for note in result.notes:
            print(f"note: {note}")
        for key, value in result.figures.items():
            print(f"{key} = {figure_text(value)}")
    if json_to_stdout:
        print(json_text(result.as_json(name)))
    elif args.json is not None:
        write_text(args.json, json_text(result.as_json(name)) + "\n")
        print(f"written: {args.json}")
    return 1 if result.figures.get("parts_failed") else 0


def positive(text: str) -> int:
    """Argparse ``type``: an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def run_alternating(turn: int, ways: Sequence[Callable[[], T]]) -> list[T]:
    """Call every way and return the results in order. Odd turns run them in reverse, because later ones benefit from
    caches that earlier ones have warmed."""
    step = -1 if turn % 2 else 1
    return [way() for way in ways[::step]][::step]


def add_model_arguments(parser: argparse.ArgumentParser, model: str) -> None:
    """Add options for model, device, dtype and threads; ``model`` is the default model."""
    parser.add_argument("--model", default=model, help="preset or checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=positive, help="torch threads (default: one per core)")


@contextmanager
def timed_calls(
    stages: Sequence[tuple[str, type, str]], clock: Callable[[], float] = time.thread_time
) -> Iterator[dict[str, float]]:
    """Patch methods to be timed inside the context, so that the data path carries no timing code for benches.

    Args:
        stages: (stage, class, method name); a stage may have several methods.
        clock: CPU time of the calling thread by default.

    Yields:
        Seconds by stage.
    """
    seconds = dict.fromkeys((stage for stage, _, _ in stages), 0.0)

    def timed(stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return method(*args, **kwargs)
            finally:
                seconds[stage] += clock() - start

        return call

    with ExitStack() as restore:
        for stage, owner, name in stages:
            restore.enter_context(mock.patch.object(owner, name, timed(stage, getattr(owner, name))))
        yield seconds


Goals = Mapping[str, tuple[str, float]]
"""Figure -> (``<=`` or ``>=``, bound). Figures not listed have no goal."""

_MEETS = {"<=": operator.le, ">=": operator.ge}


def run_parts(parts: Mapping[str, Callable[[], BenchResult]], goals: Goals) -> BenchResult:
    """Run the parts in order, printing each table once measured. A failing part becomes a row with its error and counts
    in ``parts_failed``; the others, which take minutes to an hour, still run."""
    goals = {**goals, "parts_failed": ("<=", 0.0)}
    figures: dict[str, float] = {}
    against: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, measure in parts.items():
        began = time.perf_counter()
        try:
            part = measure()
        except Exception as error:
            if len(parts) == 1:
                raise
            log.exception("%s", name)
            why = f"{type(error).__name__}: {error}"
            part = BenchResult({"parts_failed": 1.0}, [{"failed": name, "why": why}])
        print(f"{name}\n{table(part.rows)}\n", flush=True)
        print_progress(f"{name}: {time.perf_counter() - began:.0f} s")
        against += against_goals(goals, name, part.figures)
        measured += [{"part": name, **row} for row in part.rows]
        notes += [f"{name}: {note}" for note in part.notes]
        for figure, value in part.figures.items():
            # Two parts may count the same kind of violation.
            figures[figure] = figures.get(figure, 0.0) + value
    if len(parts) > 1:
        figures.setdefault("parts_failed", 0.0)
    return BenchResult(figures, measured, notes, goals=against)


def against_goals(goals: Goals, part: str, figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row per figure with its value, its goal, and whether the goal is met."""
    rows = []
    for name, measured in figures.items():
        side, goal = goals.get(name, ("", 0.0))
        rows.append(
            {
                "part": part,
                "figure": name,
                "measured": measured,
                "goal": f"{side} {goal:g}" if side else None,
                "met": ("yes" if _MEETS[side](measured, goal) else "no") if side else None,
            }
        )
    return rows
