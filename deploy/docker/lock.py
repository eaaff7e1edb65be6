"""Writes requirements-cpu.lock: what the CPU image installs, torch apart, each package with the digest of its wheel.

Versions are those of requirements-cpu.txt, digests those that PyPI gives for this platform (Linux on x86-64, this
Python). Run by ``make lock`` in the environment of ``make setup``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCK = Path(__file__).with_name("requirements-cpu.lock")
EXTRAS = ("cluster", "kafka", "otel")
APART = "torch"
"""From an index of its own, without its dependencies, which are in here."""


def normal(name: str) -> str:
    """A package's name as indexes have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Name -> version of requirements-cpu.txt."""
    lines = (ROOT / "requirements-cpu.txt").read_text(encoding="utf-8").splitlines()
    return {normal(name): version for name, version in (line.split("==") for line in lines if "==" in line)}


def closure() -> set[str]:
    """Everything that the image needs, by the metadata of what is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = list(project["dependencies"])
    asked += [each for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    left = [(Requirement(each), "") for each in asked]
    seen: set[tuple[str, str]] = set()
    while left:
        requirement, extra = left.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = normal(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                left += [(Requirement(each), wanted) for each in requires(name) or []]
    return {name for name, _ in seen}


def main() -> None:
    """Ask PyPI, and nobody else, for the digests."""
    known = pins()
    wanted = sorted(closure() - {APART})
    with tempfile.TemporaryDirectory() as folder:
        asked, report = Path(folder, "asked.txt"), Path(folder, "report.json")
        asked.write_text("".join(f"{name}=={known[name]}\n" for name in wanted), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--only-binary", ":all:", "--index-url", "https://pypi.org/simple"]
        elsewhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        command += ["--report", str(report), "--requirement", str(asked)]
        subprocess.run(command, check=True, env={**os.environ, **elsewhere})
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    digests = {normal(each["metadata"]["name"]): each["download_info"]["archive_info"]["hashes"] for each in found}
    lines = [f"{name}=={known[name]} --hash=sha256:{digests[name]['sha256']}\n" for name in wanted]
    head = "# Written by deploy/docker/lock.py (make lock): Linux on x86-64, Python 3.11. torch is apart.\n"
    LOCK.write_text(head + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
