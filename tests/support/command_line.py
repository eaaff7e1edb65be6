"""Run the console script as a user does, and know whether it left processes behind."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from unittest import mock

import psutil

from actors.cli import main

MARK = "SIGHTLINE_TEST_MARK"


class Cli:
    """Starts ``sightline`` with an environment that marks every process it leaves."""

    def __init__(self, folder):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.environment["XDG_STATE_HOME"] = str(folder / "state")
        self.environment.pop("SIGHTLINE_GATEWAY", None)
        self.started = []

    def __call__(self, *arguments, **environment):
        """Run to its end, in this process: starting Python and importing take most of a command's time."""
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.folder),
            mock.patch.dict(os.environ, {**self.environment, **environment}, clear=True),
            mock.patch.object(sys, "excepthook"),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                code = main([str(each) for each in arguments])
            except SystemExit as left:
                code = left.code
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def process(self, *arguments, timeout=60):
        """Run to its end as a process of its own."""
        return subprocess.run(
            self.command(arguments),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *arguments):
        """In the background, output in ``folder/NAME.log``; its own group, as a shell would give it."""
        log = self.folder / f"{arguments[0]}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                self.command(arguments),
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.started.append(process)
        return process, log

    def interrupt(self, process, number=signal.SIGINT, timeout=60):
        """What Ctrl-C does: the signal goes to the whole group. Returns the exit code."""
        os.killpg(process.pid, number)
        return process.wait(timeout)

    def orphans(self, within_s=30):
        """Processes still alive that this started, directly or not."""
        deadline = time.monotonic() + within_s
        while (left := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [" ".join(process.cmdline()) for process in left if process.is_running()]

    def close(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        for process in self._marked():
            process.kill()

    def _marked(self):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    @staticmethod
    def command(arguments):
        return [str(Path(sys.executable).with_name("sightline")), *map(str, arguments)]
