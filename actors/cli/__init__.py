"""The console script ``sightline``. It lives above the actors because it starts them; imports are lazy, so that
``--help`` answers at once."""

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
        # As on standard error: what a locale other than UTF-8 cannot show is escaped, and no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
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
        _complain(f"this needs {error.name}, which is not installed: {install_hint('cluster')}")
        return 2
    except typer.Abort as ended:
        # Of a question that was not answered: Ctrl-C, or the end of input.
        return INTERRUPTED if isinstance(ended.__context__, KeyboardInterrupt) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _close_output(0)
    except SystemExit as ended:
        # Of rich and typer, where the reader (`| head`) has closed the pipe.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return _close_output(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = f" {error.filename}" if error.filename else ""
        _complain(f"cannot write{place}: {error.strerror}; make room, or choose another place")
        return _close_output(1)


def _close_output(code: int) -> int:
    """Python would complain again of what is left when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _complain(message: str) -> None:
    from cluster.redaction import redact

    print(f"error: {redact(' '.join(message.split()))}", file=sys.stderr)
