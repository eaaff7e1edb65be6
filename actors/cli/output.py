"""What commands print: tables and progress for people, JSON for machines, and where each goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 200


def console(*, stderr: bool = False) -> Console:
    """A console; in a pipe or a log, where nobody's window is too narrow, its lines are long."""
    from rich.console import Console

    seen = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, soft_wrap=not seen, width=None if seen else PIPE_COLUMNS)


def write_json(target: str, body: Any) -> None:
    """Write ``body`` to a file, or to standard output for ``-``.

    Raises:
        SightlineError: the file cannot be written.
    """
    text = json.dumps(body, indent=2)
    if target == "-":
        print(text)
        return
    path = Path(target)
    check_writable(path.parent)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def save(path: Path, data: Iterable[bytes], size: int, what: str) -> int:
    """Write a file that comes in parts, with a bar on a terminal; it appears when it is whole. Returns its bytes.

    Raises:
        SightlineError: the file cannot be written, or ``data`` broke off.
    """
    from rich.progress import Progress

    check_writable(path.parent)
    part = path.with_name(f".{path.name}.part")
    try:
        with Progress(console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
            task, written = progress.add_task(what, total=size), 0
            with part.open("wb") as file:
                for each in data:
                    written += file.write(each)
                    progress.update(task, completed=written)
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        part.unlink(missing_ok=True)
    return written


class JsonLines:
    """One JSON object per line, to a file or (``-``) to standard output, readable while it grows."""

    def __init__(self, target: str) -> None:
        self._path = None if target == "-" else Path(target)
        self._file: Any = sys.stdout
        if self._path is not None:
            check_writable(self._path.parent)
            try:
                self._file = self._path.open("w", encoding="utf-8")
            except OSError as error:
                raise _unwritable(self._path, error) from None

    def write(self, body: Any) -> None:
        """Raises ``SightlineError`` when the disk is full."""
        try:
            self._file.write(json.dumps(body) + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def close(self) -> None:
        if self._path is not None:
            self._file.close()


def check_writable(folder: Path, needed_bytes: int = 1 << 16) -> None:
    """Make the folder, and write and remove a file of ``needed_bytes`` in it, before anything expensive starts.

    Raises:
        SightlineError: it cannot be made or written, or the disk is full.
    """
    probe = folder / ".sightline-write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(needed_bytes))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(path: Path | None, error: OSError) -> Exception:
    from cluster.errors import SightlineError

    where = path if path is not None else "standard output"
    return SightlineError(f"cannot write {where}: {error.strerror or error}; choose another place or make room")


def plural(count: int, noun: str) -> str:
    """``1 camera``, ``2 cameras``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
