"""What an edge box installs: the command line and the agent, with no package of the extra ``cluster`` to be had."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from chart_parts import ROOT
from gateway_parts import served_in_thread

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = re.compile(r"[\w.-]+")


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def installed():
    """Distributions that the base pulls in, by their metadata."""
    found, left = set(), [normal(NAME.match(each)[0]) for each in PROJECT["dependencies"]]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        left += [normal(NAME.match(each)[0]) for each in requires(name) or [] if "extra ==" not in each]
    return found


# As where nothing else is installed.
BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from actors.cli import main
sys.exit(main())
"""


def sightline(*arguments, timeout=60):
    slim = installed()
    others = {
        module
        for module, names in packages_distributions().items()
        if not any(normal(each) in slim or normal(each).startswith("sightline") for each in names)
    }
    assert {"torch", "ray", "transformers", "fastapi", "joserfc"} <= others
    code = f"BLOCKED = {sorted(others)!r}\n{BLOCK}"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT}/protos", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, timeout=timeout
    )


def test_help_and_version():
    assert "push" in sightline("--help").stdout
    assert "Send the encoded packets" in sightline("push", "--help").stdout


def test_the_agent_reaches_a_gateway_and_the_command_line_asks_it(tmp_path):
    with served_in_thread(tmp_path, cameras=3, live=False) as served:
        listed = sightline("cameras", "list", "--gateway", served.rpc, "--json", "-")
        assert listed.returncode == 0, listed.stderr
        assert "cam-000" in listed.stdout
        clip = next(Path(ROOT, "cluster", "codec", "clips").glob("*.mp4"))
        pushed = sightline("push", str(clip), "--gateway", served.rpc, "--camera", "nobody", "--give-up", "1")
        assert "nobody" in pushed.stderr, pushed.stderr


@pytest.mark.parametrize("command", [["serve", "-c", str(ROOT / "configs" / "minimal.yaml")], ["models", "list"]])
def test_what_needs_more_says_what_to_install(command):
    done = sightline(*command)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "pip install '.[cluster]' in a checkout" in done.stderr
