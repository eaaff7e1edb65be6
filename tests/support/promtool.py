"""Prometheus's own checker, as the tests of rules and dashboards call it."""

import shutil
import subprocess

import pytest

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")


def promtool(*arguments):
    """Exit code and everything it said."""
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=150, check=False)
    return done.returncode, done.stdout + done.stderr
