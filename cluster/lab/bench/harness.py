"""What every bench shares: its arguments, its table, its JSON, and the machine it ran on.

A bench is one module with ``add_arguments(parser)`` and ``run(args) -> BenchResult``, named in ``BENCHES`` and imported
when it is asked for; figures are ratios of one run. ``sightline bench NAME`` and ``python -m cluster.lab.bench NAME``
run the same code.
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

from cluster.errors import ConfigError
from cluster.files import check_file_writable, json_text, write_text
from cluster.lab.report.number_format import figure_text

log = logging.getLogger(__name__)

T = TypeVar("T")

BENCHES: dict[str, str] = {
    "window": "full computation against pruned and refreshed, same engine, same clips",
    "codec": "the whole front end against bare decoding of the same clip, one core",
    "families": "every model family against transformers in full, and with reuse against without",
    "ingest": "packets per second through the gateway by gRPC push, flow control on",
    "streams": "milliseconds of a core for each second of a pushed camera, by process",
    "batch": "streams stepped together against one by one",
    "engines": "our engine against vLLM: full and pruned, on the same windows",
    "cost": "seconds of steps over windows of many sizes, and the cost model fitted to them",
    "scheduler": "placement, queue, ladder and admission on simulated time",
    "memory": "what compressors cost and cover, under a cap, on the KV that leaves real windows",
    "alerts": "from an answer to a webhook that has it, and what is lost when everything is killed",
    "dashboards": "every dashboard panel against a running cluster and a real Prometheus, series per camera",
    "console": "the wall of cameras in a real browser: first paint, and growth while it stays open",
    "console_tasks": "what people do in the console, by pointer and keyboard, on a cluster that begins with no camera",
    "fleet": "a question to every camera's memory, and the delay of a live view in a real browser",
    "faults": "silent faults caused on purpose: positions, gaps, kills, outages, attacks, leaks",
    "fuzz": "malformed input to every gRPC method, HTTP and YAML: nothing dies, hangs or answers with a defect",
    "gpu": "the engine on a GPU; --dry-run: launches, reads, copies and faults on a fake one",
    "soak": "memory after thousands of windows on one camera",
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
"""Benches, and parts of them, that are test tools: their modules in tests/support, which is not installed."""

SUPPORT = Path(__file__).resolve().parents[3] / "tests" / "support"


def load_module(name: str) -> ModuleType:
    """The module of a bench, or of a part of one. Raises ``ConfigError``: it is in tests/support, and this is an
    installed copy."""
    if name not in IN_CHECKOUT:
        return importlib.import_module(f"cluster.lab.bench.{name}")
    if not SUPPORT.is_dir():
        raise ConfigError(f"{name} needs a checkout of Sightline's source: it is part of the tests")
    if str(SUPPORT) not in sys.path:
        sys.path.append(str(SUPPORT))
    return importlib.import_module(IN_CHECKOUT[name])


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Of a bench, or of a part of one. ``figures``: name -> ratio, rate or count of this run; ``rows``: the table
    behind them; ``goals``: every figure against its goal, of a bench that has some, which is then the
    table that is printed."""

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
    """Processor, cores, memory and library versions: what a reader needs to compare two runs."""
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
    """Print a line of progress to stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as aligned plain text, with a column for every key of any; an empty list gives an empty string."""
    if not rows:
        return ""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_show(row.get(key)) for key in keys] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in cells)) for i, key in enumerate(keys)]
    lines = ["  ".join(key.ljust(widths[i]) for i, key in enumerate(keys))]
    for line in cells:
        lines.append("  ".join(text.rjust(widths[i]) if i else text.ljust(widths[0]) for i, text in enumerate(line)))
    return "\n".join(line.rstrip() for line in lines)


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


class _WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults to help that does not speak of one itself."""

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
        prog=f"sightline bench {name}", description=module.__doc__, formatter_class=_WithDefaults
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write figures, rows and machine as JSON; - for standard output"
    )
    module.add_arguments(parser)
    args = parser.parse_args(rest)
    # Tables go to standard error then.
    alone = args.json == Path("-")
    if args.json is not None and not alone:
        check_file_writable(args.json)
    if getattr(args, "threads", None):
        importlib.import_module("torch").set_num_threads(args.threads)
    with redirect_stdout(sys.stderr) if alone else nullcontext():
        result: BenchResult = module.run(args)
        print(table(result.goals or result.rows))
        for note in result.notes:
            print(f"note: {note}")
        for key, value in result.figures.items():
            print(f"{key} = {figure_text(value)}")
    if alone:
        print(json_text(result.as_json(name)))
    elif args.json is not None:
        write_text(args.json, json_text(result.as_json(name)) + "\n")
        print(f"written: {args.json}")
    return 1 if result.figures.get("parts_failed") else 0


def positive(text: str) -> int:
    """``type`` of an option that counts something: a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def each_first(turn: int, ways: Sequence[Callable[[], T]]) -> list[T]:
    """What the ways return, in their order; in every other turn the last is run first, since what comes second finds
    what the first has left in caches."""
    step = -1 if turn % 2 else 1
    return [way() for way in ways[::step]][::step]


def add_model_arguments(parser: argparse.ArgumentParser, model: str) -> None:
    """Model, device and threads of a bench that runs an engine; ``model`` is the default."""
    parser.add_argument("--model", default=model, help="preset or checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=positive, help="torch threads (default: one per core)")


@contextmanager
def timed_calls(
    stages: Sequence[tuple[str, type, str]], clock: Callable[[], float] = time.thread_time
) -> Iterator[dict[str, float]]:
    """Time methods of classes from outside while inside: the data path carries no stopwatches for a bench's sake.

    Args:
        stages: name of the stage, class, method; several methods may be of one stage.
        clock: of this thread's processor time by default.

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

    with ExitStack() as untimed:
        for stage, owner, name in stages:
            method = getattr(owner, name)
            untimed.callback(setattr, owner, name, method)
            setattr(owner, name, timed(stage, method))
        yield seconds


Goals = Mapping[str, tuple[str, float]]
"""Figure -> the side of which number it should be on; figures that are not in it have no goal."""

_MEETS = {"<=": operator.le, ">=": operator.ge}


def run_parts(parts: Mapping[str, Callable[[], BenchResult]], goals: Goals) -> BenchResult:
    """Measure the parts one after the other; each prints its table as soon as it has it. Of one that fails the reason
    is a row: it costs the others, of minutes to an hour, nothing (``parts_failed``)."""
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
    """One row per figure: what was measured, and whether that meets its goal."""
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
