"""The command tree. Each command has its own file and imports its dependencies when it runs."""

from inspect import cleandoc
from typing import Annotated, Any

import typer

from actors.cli import (
    ask,
    cameras,
    configuration,
    doctor,
    evaluate,
    incidents,
    loadtest,
    memory,
    models,
    plan,
    push,
    replicas,
    scenes,
    serve,
    tokens,
    train,
    watch,
)
from actors.cli.demo.command import demo
from cluster import __version__

HELP = """Run vision-language models on thousands of cameras, computing only what changed.

[bold]$ sightline demo[/bold]: try it on this machine, with four synthetic cameras

[bold]$ sightline serve -c configs/minimal.yaml[/bold]: start a cluster

[bold]$ sightline watch[/bold]: stream its answers
"""

HELP_NAMES = ["-h", "--help"]

# Everything after the name of a benchmark is passed to it, --help included.
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

EPILOG = (
    "[bold]Exit codes[/bold]: 0 success · 1 failure at run time · 2 invalid command line or configuration, nothing "
    "was started · 3 camera added, but its source does not answer · 130 interrupted with Ctrl-C."
)


def command() -> Any:
    """The command line application."""
    app = typer.Typer(
        name="sightline",
        help=HELP,
        epilog=EPILOG,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": HELP_NAMES},
    )
    app.callback()(_options)
    app.command("demo")(demo)
    app.command("serve")(serve.serve)
    app.add_typer(cameras.app, name="cameras")
    app.add_typer(replicas.app, name="replicas")
    app.command("watch")(watch.watch)
    app.add_typer(incidents.app, name="incidents")
    app.add_typer(incidents.alerts, name="alerts")
    app.command("ask")(ask.ask)
    app.command("memory")(memory.memory)
    app.command("forget")(memory.forget)
    app.command("push")(push.push)
    app.add_typer(scenes.app, name="scenes")
    app.add_typer(evaluate.app, name="eval")
    app.command("bench", context_settings=PASS_THROUGH)(_bench)
    app.add_typer(configuration.app, name="config")
    app.add_typer(models.app, name="models")
    app.add_typer(train.app, name="train")
    app.add_typer(tokens.app, name="tokens")
    app.add_typer(plan.app, name="plan")
    app.add_typer(loadtest.app, name="loadtest")
    app.command("doctor")(doctor.doctor)
    return _plain_help(typer.main.get_command(app))


def _plain_help(command: Any) -> Any:
    """Remove from the help of a command and its subcommands what typer shows: `<bool>` after flags, and the docstring's
    line breaks within paragraphs."""
    paragraphs = cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(each.split("\n")) for each in paragraphs)
    for option in (*command.params, command.get_help_option(typer.Context(command, help_option_names=HELP_NAMES))):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _plain_help(each)
    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"sightline {__version__}")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    del show_version


def _bench(context: typer.Context) -> None:
    """Run a benchmark on this machine; prints a table, and writes it as JSON with --json FILE.

    [bold]sightline bench[/bold] lists the benchmarks, [bold]sightline bench NAME --help[/bold] the options of one.

    $ sightline bench window --json out/window.json
    """
    from cluster.lab.bench.harness import main

    raise typer.Exit(main(context.args))
