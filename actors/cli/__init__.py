"""The console script ``sightline``. It lives above the actors because it starts them; imports are lazy, so that
``--help`` answers at once."""

import os
import sys
from collections.abc import Sequence

from cluster.errors import SightlineError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see ``sightline --help``). Expected errors are printed as one line."""
    import typer

    from actors.cli.app import command
    from cluster.redaction.known_secrets import redact_tracebacks

    redact_tracebacks()
    try:
        done = command().main(
            args=list(sys.argv[1:] if argv is None else argv), prog_name="sightline", standalone_mode=False
        )
        sys.stdout.flush()
        return done if isinstance(done, int) else 0
    except SightlineError as error:
        _complain(str(error))
        return error.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return error.exit_code
        _complain(error.format_message().removesuffix("."))
        if context is not None:
            print(f"try: {context.command_path} --help", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("actors", "cluster", "loadtest", "sightline"):
            raise
        _complain(f"this needs {error.name}, which is not installed: pip install 'sightline-cluster[cluster]'")
        return 2
    except typer.Abort:
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(message: str) -> None:
    from cluster.redaction import redact

    print(f"error: {redact(' '.join(message.split()))}", file=sys.stderr)
