"""Runs the cases, watches the process they are done to, and says which of them it did not take well."""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from process_memory import process_memory_mib

from cluster.errors import ConfigError, SightlineError
from cluster.lab.bench.harness import BenchResult
from fuzz.documents import DocumentCases
from fuzz.http import HttpCases
from fuzz.rpc import RpcCases

SHARES = {"rpc": 0.4, "http": 0.3, "documents": 0.3}
AT_ONCE = 24
START_S = 180.0
GROWTH_MIB = 200.0
"""What the process may have more at the end than after the first tenth of the cases, once everything was seen."""
SHOWN = 20
SUPPORT = Path(__file__).resolve().parents[1]
LEFT = "grpc._cython.cygrpc.ExecuteBatchError"
OURS = ("cluster/", "cluster.", "actors/")

Case = Callable[[random.Random], Awaitable[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the harness."""
    parser.add_argument("--cases", type=int, default=100_000, metavar="N", help="cases in all")
    parser.add_argument("--seed", type=int, default=7, help="what every case follows from")
    parser.add_argument("--only", metavar="PART:NUMBER", help="one case again, as rpc:1234")


def run(args: argparse.Namespace) -> BenchResult:
    """Figures: ``fuzz_crashes``, ``fuzz_cases``, ``fuzz_seconds``, ``fuzz_growth_mib``.

    Raises:
        ConfigError: no cases, or no such one.
    """
    if args.cases < len(SHARES):
        raise ConfigError(f"--cases must be at least {len(SHARES)}, not {args.cases}")
    counts = {part: round(share * args.cases) for part, share in SHARES.items()}
    first = dict.fromkeys(SHARES, 0)
    if args.only is not None:
        part, _, number = args.only.partition(":")
        if part not in SHARES or not number.isdigit():
            raise ConfigError(f"--only is one of {', '.join(SHARES)}, a colon and a number, not {args.only!r}")
        counts = dict.fromkeys(SHARES, 0) | {part: 1}
        first[part] = int(number)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sightline-fuzz-") as folder:
        report = asyncio.run(_run(Path(folder), args.seed, counts, first))
    figures = {
        "fuzz_crashes": float(len(report.failures)),
        "fuzz_cases": float(sum(counts.values())),
        "fuzz_seconds": time.monotonic() - began,
        "fuzz_growth_mib": report.growth_mib,
    }
    rows = [
        {
            "part": part,
            "cases": counts[part],
            "failed": report.failed[part],
            "seconds": report.seconds[part],
            "outcomes": ", ".join(f"{name} {count}" for name, count in report.outcomes[part].most_common()),
        }
        for part in SHARES
    ]
    shown = [failure.replace("\n", " ")[:600] for failure in report.failures[:SHOWN]]
    return BenchResult(figures, rows, shown)


@dataclass(slots=True)
class Report:
    """What went wrong, as sentences; seconds and failures by part."""

    failures: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    growth_mib: float = 0.0

    def add(self, part: str, failure: str) -> None:
        """One more of a part."""
        self.failed[part] += 1
        self.failures.append(failure)


async def _run(folder: Path, seed: int, counts: dict[str, int], first: dict[str, int]) -> Report:
    report, log = Report(), folder / "server.log"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fuzz.server",
        str(log),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        # There ``python -m`` finds this package.
        cwd=SUPPORT,
    )
    try:
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        if not line:
            raise SightlineError(f"the process to be fuzzed did not start; run python -m fuzz.server LOG in {SUPPORT}")
        addresses: dict[str, str] = json.loads(line)
        await _all(folder, addresses, process, seed, counts, first, report)
        if process.returncode is not None:
            report.add("rpc", f"the process died with exit code {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    for unexpected in unexpected_in(log.read_text(errors="replace") if log.exists() else ""):
        report.add("rpc", f"an exception in the log: {unexpected}")
    return report


async def _all(
    folder: Path,
    addresses: dict[str, str],
    process: asyncio.subprocess.Process,
    seed: int,
    counts: dict[str, int],
    first: dict[str, int],
    report: Report,
) -> None:
    rpc, http, documents = RpcCases(addresses), HttpCases(addresses["http"]), DocumentCases(folder)
    await http.learn()

    async def document(rng: random.Random) -> str:
        return documents.one(rng)

    cases: dict[str, Case] = {"rpc": rpc.one, "http": http.one, "documents": document}
    for part, case in cases.items():
        began = time.monotonic()
        before = 0.0
        # The first tenth fills every pool and cache that there is.
        for start, end in ((0, counts[part] // 10), (counts[part] // 10, counts[part])):
            await _part(part, case, seed, range(first[part] + start, first[part] + end), report, process)
            before = before or process_memory_mib("VmRSS", process.pid)
        growth = process_memory_mib("VmRSS", process.pid) - before if process.returncode is None else 0.0
        report.growth_mib = max(report.growth_mib, growth)
        if growth > GROWTH_MIB:
            report.add(part, f"the process grew by {growth:.0f} MiB over the cases of {part}")
        report.seconds[part] = round(time.monotonic() - began, 1)
    report.outcomes = {"rpc": rpc.outcomes, "http": http.outcomes, "documents": documents.outcomes}
    await rpc.close()


async def _part(
    part: str, case: Case, seed: int, numbers: range, report: Report, process: asyncio.subprocess.Process
) -> None:
    waiting = iter(numbers)

    async def work() -> None:
        for number in waiting:
            if process.returncode is not None:
                return
            failure = await case(random.Random(f"{seed}:{part}:{number}"))
            if failure:
                report.add(part, f"{part}:{number}: {failure}")

    await asyncio.gather(*(work() for _ in range(1 if part == "documents" else AT_ONCE)))


def unexpected_in(log: str) -> list[str]:
    """The last line of every traceback that runs through our code.

    Left out is what gRPC sometimes writes down of a client whose deadline passed while its reply was on the way.
    """
    found: list[str] = []
    lines = log.splitlines()
    at = 0
    while at < len(lines):
        if lines[at].startswith("Traceback"):
            end = at + 1
            while end < len(lines) and (lines[end].startswith(" ") or not lines[end]):
                end += 1
            body = lines[at:end]
            last = lines[end] if end < len(lines) else ""
            if not last.startswith(LEFT) and any(
                f'"{ours}' in line or f"/{ours}" in line for line in body for ours in OURS
            ):
                where = next((line.strip() for line in reversed(body) if line.startswith("  File")), "")
                found.append(f"{last} at {where}")
            at = end
        at += 1
    return found
