"""Who imports whom: arrows only run from actors to cluster, and a decoder needs neither torch nor Ray."""

from __future__ import annotations

import ast
import functools
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import cluster

ROOT = Path(__file__).parent.parent


def modules(package: str) -> list[str]:
    """Every module of a package, found without importing any."""
    folder = ROOT.joinpath(*package.split("."))
    found = [package]
    for info in pkgutil.iter_modules([str(folder)]):
        name = f"{package}.{info.name}"
        if info.ispkg:
            found += modules(name)
        elif not needs_vllm(folder / f"{info.name}.py"):
            found.append(name)
    return [name for name in found if not name.endswith("__main__")]


def needs_vllm(file: Path) -> bool:
    """Whether a module of the vLLM engine loads it at once: such run only where it is installed, in its processes."""
    nodes = ast.parse(file.read_text()).body if "vllm" in file.parts else []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    local = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names if "engine.vllm" in name]
    return any(name.split(".")[0] == "vllm" for name in names) or any(needs_vllm(f) for f in local if f.exists())


def loaded_by(names: list[str]) -> set[str]:
    """Top-level packages (and ours with one level) in a fresh interpreter after importing ``names``."""
    code = f"import importlib, json, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    code += "print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    every = json.loads(done.stdout.splitlines()[-1])
    return {name.split(".")[0] for name in every} | {".".join(name.split(".")[:2]) for name in every}


def test_nothing_in_cluster_loads_ray_or_actors() -> None:
    assert not loaded_by(modules("cluster")) & {"ray", "actors", "loadtest"}


def test_nothing_in_cluster_names_ray_or_actors_even_inside_a_function() -> None:
    """``cluster.lab.bench`` measures whole clusters when asked to; everything else must not know them."""
    for path in sorted(Path(cluster.__path__[0]).rglob("*.py")):
        if "bench" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"ray", "actors", "loadtest"}, path


def test_a_decoder_needs_no_torch() -> None:
    loaded = loaded_by([*modules("cluster.codec"), *modules("cluster.vision"), "cluster.types"])
    assert not loaded & {"torch", "transformers", "ray", "grpc", "pydantic", "cluster.models", "cluster.engine"}
    actor = loaded_by(["cluster.decoder.running_camera"])
    assert not actor & {"torch", "transformers", "ray"}


def test_the_decoder_actor_loads_no_model_code() -> None:
    assert not loaded_by(["actors.decoder"]) & {"torch", "transformers", "cluster.models"}


def test_scheduling_needs_no_torch_and_no_wire() -> None:
    loaded = loaded_by(modules("cluster.control"))
    assert not loaded & {
        "torch",
        "transformers",
        "ray",
        "grpc",
        "av",
        "cluster.wire",
        "cluster.codec",
        "cluster.models",
    }


@pytest.mark.parametrize("package", ["cluster.engine", "cluster.models"])
def test_engine_and_models_know_nothing_of_the_rest(package: str) -> None:
    loaded = loaded_by(modules(package))
    assert not loaded & {"ray", "grpc", "av", "pydantic", "prometheus_client", "typer"} - baseline()
    assert not loaded & {f"cluster.{name}" for name in ("codec", "vision", "rpc", "config", "scheduling", "metrics")}


@functools.cache
def baseline() -> set[str]:
    """What torch and transformers themselves load."""
    return loaded_by(["torch", "transformers", "transformers.models.auto.modeling_auto"])
