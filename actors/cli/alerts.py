"""``sightline alerts``: try the sinks."""

from typing import Annotated

import typer

from actors.cli.options import DEFAULT_GATEWAY, Gateway, connect
from actors.cli.output import console

app = typer.Typer(no_args_is_help=True, help="Try the sinks of alerts.")


@app.callback()
def group() -> None:
    """Try the sinks of alerts."""


@app.command("test")
def try_sink(
    sink: Annotated[str, typer.Argument(metavar="SINK", help="Name of the sink in alerts.sinks.")],
    gateway: Gateway = DEFAULT_GATEWAY,
) -> None:
    """Send a made-up incident to one sink, and say whether it was accepted.

    $ sightline alerts test telegram
    """
    with connect(gateway) as client:
        client.test_sink(sink)
    console().print(f"{sink} accepted the test", markup=False)
