"""``sightline bench``: the same code as ``python -m cluster.lab.bench``."""

import typer

# Everything after the name belongs to the bench, --help included.
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure something on this machine; prints a table and writes it with --json FILE.

    [bold]sightline bench[/bold] lists the benches, [bold]sightline bench NAME --help[/bold] the options of one.

    $ sightline bench window --json out/window.json
    """
    from cluster.lab.bench.harness import main

    raise typer.Exit(main(context.args))
