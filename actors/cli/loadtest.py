"""``sightline loadtest``: simulated cameras against a real cluster, and the largest fleet that it sustains."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.cli.options import Json, Settings, client_credentials, parse_settings
from actors.cli.output import Progress, check_json_target, console, make_table, print_json
from cluster.errors import ConfigError, SightlineError
from cluster.lab.report.number_format import seconds_text

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.config import SightlineConfig
    from cluster.lab.report.page import Table
    from loadtest.footage import Footage
    from loadtest.profile import Profile
    from loadtest.report import Facts
    from loadtest.result import Measurement, Tick
    from loadtest.search import Search, Try
    from loadtest.target import Target

HELP = "Load a real cluster with simulated cameras: measure what it sustains and how it survives faults."
app = typer.Typer(no_args_is_help=True, help=HELP)

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Start a cluster from this configuration, without its cameras, sinks and state folders.",
    ),
]
Running = Annotated[
    str | None,
    typer.Option("--gateway", "-g", metavar="HOST:PORT", help="Test a running cluster instead of starting one."),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="With --gateway: address of its /metrics, for losses by reason; token and TLS as for the gateway.",
    ),
]
ProfileName = Annotated[
    str, typer.Option("--profile", "-p", metavar="NAME", help="Load profile; see `sightline loadtest profiles`.")
]
Seconds = Annotated[
    float | None, typer.Option("--seconds", min=1.0, help="Duration of the measurement. Default: the profile's.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the report as one HTML page.")]


@app.command("run")
def run(
    config: Config = None,
    gateway: Running = None,
    metrics: Metrics = None,
    profile: ProfileName = "steady",
    streams: Annotated[
        int | None, typer.Option("--streams", "-n", min=1, help="Number of cameras. Default: the profile's.")
    ] = None,
    seconds: Seconds = None,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", "-f", metavar="NAME", help="Inject this fault; repeatable. See `loadtest faults`."),
    ] = None,
    settings: Settings = None,
    json: Json = None,
    out: Out = None,
) -> None:
    """Run a fixed number of cameras, open loop: they send on schedule whether or not the cluster keeps up.

    Exits with code 1 if the cluster did not keep up, a window was neither answered nor counted as lost, or a camera
    failed or was not back on time after a fault.

    $ sightline loadtest run -c configs/loadtest.yaml --streams 100 --out out/load.html

    $ sightline loadtest run -c configs/loadtest.yaml --set cluster.replicas=2 --fault kill-replica --json out/kill.json

    $ sightline loadtest run --gateway 10.0.0.5:50051 --profile aligned --streams 200
    """
    import asyncio

    from loadtest.faults import faults
    from loadtest.report import others_text, run_json, run_tables, verdict_text
    from loadtest.run import run_test

    chosen = _profile(profile, streams=streams, measure_s=seconds)
    for name in fault or ():
        faults.get(name)
    loaded = _config(config, gateway, settings)
    for path in (json, out):
        check_json_target(path)
    screen = console(stderr=json == "-")
    with _LoadProgress() as progress:
        footage = _footage(chosen, progress)
        with _target(loaded, gateway, metrics, progress, redis="kill-redis" in (fault or ())) as target:
            found = asyncio.run(
                run_test(target, chosen, footage, faults=fault or (), on_tick=progress.tick, on_phase=progress.begin)
            )
    facts = _facts("Load test", profile, chosen, target.config, own=target.own)
    head, good = verdict_text(found)
    screen.print(head, style=f"bold {'green' if good else 'red'}", markup=False)
    if others := others_text(found.ticks):
        screen.print(f"[yellow]{others}[/]")
    _report(screen, run_tables(found), json, run_json(facts, found), out, facts, found)
    if not good:
        raise SightlineError("the load test failed: " + head.rstrip("."))


@app.command("search")
def search(
    config: Config = None,
    gateway: Running = None,
    metrics: Metrics = None,
    profile: ProfileName = "busy",
    seconds: Seconds = None,
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of replicas; repeatable, to measure scaling.")
    ] = None,
    first: Annotated[int, typer.Option(min=1, help="Streams to start with.")] = 8,
    most: Annotated[int, typer.Option(min=1, help="Upper limit of the search.")] = 2048,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the search's state here, and resume from it.")
    ] = None,
    settings: Settings = None,
    json: Json = None,
    out: Out = None,
) -> None:
    """Find the largest number of cameras that a cluster sustains.

    A count is stable when, twice in a row, the p99 lag is within a stride, at least 99 % of windows are answered, and
    none is silently missing. The quality ladder stays on, and the result says what share of the cameras it lowered;
    `--set scheduling.ladder=false` turns it off. The count is doubled, then bisected; then, restarting at the last
    stable count with evenly spaced starts, one stream is added at a time.

    $ sightline loadtest search -c configs/loadtest.yaml --state out/search.json --json out/streams.json

    $ sightline loadtest search -c configs/loadtest.yaml --replicas 1 --replicas 2
    """
    import asyncio

    from loadtest.report import search_json, search_tables, search_text
    from loadtest.run import SearchResult, run_search

    chosen = _profile(profile, measure_s=seconds)
    loaded = _config(config, gateway, settings)
    if gateway is not None and replicas:
        raise ConfigError("--replicas is for a cluster that the search starts itself; leave out --gateway")
    for path in (json, out, state):
        check_json_target(path)
    screen = console(stderr=json == "-")
    results: list[SearchResult] = []
    with _LoadProgress() as progress:
        footage = _footage(chosen, progress)
        for count in replicas or [loaded.cluster.replicas]:
            sized = loaded.model_copy(update={"cluster": loaded.cluster.model_copy(update={"replicas": count})})
            plan, save = _search(sized, profile, chosen, first, most, state, progress, gateway=gateway)
            with _target(sized, gateway, metrics, progress) as target:
                searching = run_search(
                    target,
                    chosen,
                    footage,
                    plan,
                    save=save,
                    on_tick=progress.tick,
                    on_try=progress.trying,
                    on_result=progress.tried,
                )
                results.append(asyncio.run(searching))
    facts = _facts("Maximum streams", profile, chosen, target.config, own=target.own)
    screen.print(f"[bold]{search_text(results)}[/]")
    body = search_json(facts, results, two_cores=_two_cores(chosen, loaded))
    _report(screen, search_tables(results), json, body, out, facts, results)


@app.command("profiles")
def profiles() -> None:
    """List the built-in load profiles.

    $ sightline loadtest profiles
    """
    from loadtest.profile import PROFILES

    console().print(make_table("!profile|about", [(name, PROFILES.load(name).about) for name in PROFILES.names()]))


@app.command("faults")
def list_faults() -> None:
    """List the faults of `loadtest run --fault`.

    $ sightline loadtest faults
    """
    from loadtest.faults import faults

    console().print(make_table("!fault|about", [(name, faults.get(name).about) for name in faults.names()]))


# -- used by both commands ------------------------------------------------------------------------
def _profile(name: str, **changes: Any) -> Profile:
    from loadtest.profile import PROFILES

    return PROFILES.load(name).model_copy(update={key: value for key, value in changes.items() if value is not None})


def _config(path: Path | None, gateway: str | None, settings: list[str] | None) -> SightlineConfig:
    from cluster.config import load_config
    from cluster.wire.channel import split_address

    if path is None and gateway is None:
        raise ConfigError(
            "nothing to test; give --config FILE to start a cluster, or --gateway HOST:PORT of a running one"
        )
    if gateway is not None:
        split_address(gateway)
    loaded = load_config(path, parse_settings(settings))
    # The simulated cameras must be the only load; their alerts must reach nobody, and their clips must not displace
    # real ones.
    return loaded.model_copy(
        update={
            "cameras": [],
            "cluster": loaded.cluster.model_copy(update={"state_dir": None}),
            "alerts": loaded.alerts.model_copy(update={"sinks": [], "folder": None}),
            "clips": loaded.clips.model_copy(update={"folder": None}),
        }
    )


def _footage(profile: Profile, progress: _LoadProgress) -> dict[str, Footage]:
    from loadtest.footage import gather

    progress.begin("making footage")
    return gather(list(profile.mix), fps=profile.fps, size=(profile.width, profile.height), crf=profile.crf)


@contextlib.contextmanager
def _target(
    config: SightlineConfig, gateway: str | None, metrics: str | None, progress: _LoadProgress, *, redis: bool = False
) -> Iterator[Target]:
    from loadtest.target import Target, own_cluster

    credentials = client_credentials()
    with contextlib.ExitStack() as stack:
        if gateway is not None:
            target = Target(gateway, metrics, config, credentials=credentials)
        else:
            target = stack.enter_context(own_cluster(config, progress.begin, credentials, redis=redis))
        if trouble := target.metrics_trouble():
            progress.say(f"the metrics page at {target.metrics} cannot be read: {trouble}; losses lack reasons")
        yield target


def _search(
    config: SightlineConfig,
    name: str,
    profile: Profile,
    first: int,
    most: int,
    state: Path | None,
    progress: _LoadProgress,
    *,
    gateway: str | None = None,
) -> tuple[Search, Any]:
    from loadtest.search import Search

    settings = {
        "profile": name,
        "settings": profile.model_dump(mode="json"),
        "cluster": config.model_dump(mode="json", exclude={"gateway": True}),
    }
    if gateway is not None:
        settings["gateway"] = gateway
    plan = Search(first=first, most=most, settings=settings)
    if state is None:
        return plan, lambda: None
    replicas = config.cluster.replicas
    path = state.with_name(f"{state.stem}-{replicas}{state.suffix}") if replicas > 1 else state
    known = plan.load(path)
    if known:
        progress.begin(f"resuming the search in {path}, which has {known} measurements")
    return plan, lambda: plan.save(path)


def _facts(title: str, name: str, profile: Profile, config: SightlineConfig, *, own: bool) -> Facts:
    from loadtest.report import Facts

    window, sampling = config.window, config.sampling
    cluster = {
        "window": f"{window.length_s:g} s every {window.stride_s:g} s, {sampling.fps:g} samples a second",
        "footage": f"{profile.fps:g} frames a second, {profile.width}x{profile.height}, by {profile.transport}",
    }
    if own:
        members = config.cluster
        cluster |= {
            "engine": config.engine + (f", costs {config.simulated.costs}" if config.engine == "simulated" else ""),
            "model": config.model.name,
            "processes": f"{members.replicas} replicas, {members.decoders} decoders, 1 gateway on this machine",
        }
    return Facts(title, name, profile, cluster, simulated=own and config.engine == "simulated")


def _two_cores(profile: Profile, config: SightlineConfig) -> bool:
    """Whether this search measures the figure ``streams_two_cores``: profile `dense`, default windows, simulated
    engine, two cores."""
    from cluster.config.camera import WindowConfig

    dense = _profile("dense", streams=profile.streams, measure_s=profile.measure_s)
    usual = profile == dense and config.window == WindowConfig() and config.engine == "simulated"
    return usual and len(os.sched_getaffinity(0)) == 2


def _report(
    screen: Console, tables: Sequence[Table], json: str | None, body: Any, out: Path | None, facts: Facts, found: Any
) -> None:
    """Print a test's tables, then write its JSON and its page if requested."""
    from cluster.lab.report.page import write_files
    from loadtest.report import page

    for table in tables:
        table.show(screen)
    print_json(json, body)
    if out is not None:
        write_files(out.parent, {out.name: page(facts, found)})
        screen.print(f"written: {out}", markup=False)


class _LoadProgress(Progress):
    """Progress of a load test, as a bar or as lines."""

    def trying(self, streams: int, phase: str) -> None:
        self.begin(f"trying {streams} streams ({phase})")

    def tried(self, result: Try, measurement: Measurement) -> None:
        word = "kept up" if result.stable else f"did not keep up: {result.note}"
        self.say(f"{result.streams} streams: p99 lag {seconds_text(measurement.lag.p99)}, {word}")

    def tick(self, tick: Tick) -> None:
        self.show(
            f"{self.phase}: {tick.at_s:.0f} s, {tick.streams} streams, {tick.answers} answers a second, "
            f"lag {seconds_text(tick.lag_p50_s)} (p99 {seconds_text(tick.lag_p99_s)}), machine {tick.use.busy:.0%} busy"
        )
