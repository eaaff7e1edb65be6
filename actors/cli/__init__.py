"""The console script ``sightline``, above the actors because it starts them. Lazy imports keep ``--help`` fast."""

import errno
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from cluster.errors import SightlineError, install_hint

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see ``sightline --help``). Expected errors are printed as one line."""
    import typer

    from actors.cli.app import command
    from cluster.redaction.known_secrets import redact_tracebacks

    redact_tracebacks()
    if isinstance(sys.stdout, TextIOWrapper):
        # As on standard error: escape what a non-UTF-8 locale cannot show instead of failing.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        done = command().main(
            args=list(sys.argv[1:] if argv is None else argv), prog_name="sightline", standalone_mode=False
        )
        sys.stdout.flush()
        return done if isinstance(done, int) else 0
    except SightlineError as error:
        _print_error(str(error))
        return error.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return error.exit_code
        _print_error(error.format_message().removesuffix("."))
        if context is not None:
            print(f"try: {context.command_path} --help", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("actors", "cluster", "loadtest", "sightline"):
            raise
        _print_error(f"this needs {error.name}, which is not installed: {install_hint('cluster')}")
        return 2
    except typer.Abort as ended:
        # A prompt was ended by Ctrl-C or by the end of input.
        return INTERRUPTED if isinstance(ended.__context__, KeyboardInterrupt) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _close_output(0)
    except SystemExit as ended:
        # Raised by rich and typer when the reader (`| head`) has closed the pipe.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return _close_output(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = f" {error.filename}" if error.filename else ""
        _print_error(f"cannot write{place}: {error.strerror}; free some space, or choose another path")
        return _close_output(1)


def _close_output(code: int) -> int:
    """Redirect what is still buffered to /dev/null, so that Python's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _print_error(message: str) -> None:
    from cluster.redaction import redact

    print(f"error: {redact(' '.join(message.split()))}", file=sys.stderr)
