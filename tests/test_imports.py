"""Who imports whom: from the top row of rooms to the bottom one and never in a circle; who needs torch, who Ray."""

import ast
import functools
import json
import pkgutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from cluster.lab.bench.harness import IN_CHECKOUT

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


def loaded_by(*groups: list[str]) -> list[set[str]]:
    """Top-level packages (and ours with one level) in a fresh interpreter after importing each group, one after the
    other."""
    code = (
        f"import importlib, json, sys\nfor names in {groups!r}:\n    for name in names: importlib.import_module(name)\n"
    )
    code += "    print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    every = [json.loads(line) for line in done.stdout.splitlines()[-len(groups) :]]
    return [
        {name.split(".")[0] for name in names} | {".".join(name.split(".")[:2]) for name in names} for names in every
    ]


# Who may import whom: a room those of the rows above it, and those beside it where nothing comes back.
ROWS = """
errors files hosts registry types
codec models redaction
logs metrics security
memory vision wire
config
control engine tracing
alerts decoder replica
client
gateway kubernetes
actors
lab loadtest
actors.cli
"""
ROW = {room: row for row, rooms in enumerate(ROWS.split("\n")) for room in rooms.split()}


def room(module: str) -> str:
    """The command line is a room of its own, above what it starts."""
    parts = module.split(".")
    if parts[0] == "cluster":
        return parts[1]
    return "actors.cli" if parts[:2] == ["actors", "cli"] else parts[0]


def files() -> dict[str, Path]:
    """Every module of ours, by name."""
    found = [path for top in ("cluster", "actors", "loadtest") for path in sorted(ROOT.joinpath(top).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in found]
    return dict(zip(names, found, strict=True))


@functools.cache
def imported(path: Path) -> set[str]:
    """Modules that the statements of a file import, also inside functions and for types alone; names from modules too,
    as ``module.name``."""
    found = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        # No expression imports: most of a tree need not be gone through.
        waiting += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
    return found


@functools.cache
def named_by(path: Path) -> set[str]:
    """Modules of ours and Ray that a file imports, and what it gives to ``import_module``."""
    found = imported(path)
    if "import_module" in (text := path.read_text()):
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        given = [ast.unparse(each.args[0]) for each in calls if ast.unparse(each.func).endswith("import_module")]
        found = found | {name.lstrip("f").strip("'\"").partition("{")[0].rstrip(".") for name in given}
    return {name for name in found if name.split(".")[0] in ("cluster", "actors", "loadtest", "ray")}


@functools.cache
def arrows() -> dict[tuple[str, str], set[str]]:
    """``(room, room it imports)`` -> modules that do."""
    known = files()
    found: dict[tuple[str, str], set[str]] = {}
    for module, path in known.items():
        if module == "cluster":
            continue
        for name in named_by(path):
            if name.startswith("ray") or name in ("cluster", "cluster.__version__"):
                continue
            if room(name) != room(module):
                found.setdefault((room(module), room(name)), set()).add(module)
    return found


def test_every_room_has_its_row() -> None:
    assert {room(module) for module in files() if module != "cluster"} == set(ROW)


def test_no_arrow_runs_upwards() -> None:
    assert {arrow: modules for arrow, modules in arrows().items() if ROW[arrow[1]] > ROW[arrow[0]]} == {}


def test_there_is_no_circle() -> None:
    """Between rooms of one row: all others are excluded by the rows."""
    beside = {room: {b for a, b in arrows() if a == room and ROW[a] == ROW[b]} for room in ROW}
    assert tuple(TopologicalSorter(beside).static_order())


def test_the_library_names_neither_ray_nor_what_measures_it() -> None:
    found = {module: named_by(path) for module, path in files().items() if module.startswith("cluster.")}
    library = {module: names for module, names in found.items() if not module.startswith("cluster.lab")}
    forbidden = ("ray", "actors", "loadtest", "cluster.lab")
    assert {
        module
        for module, names in library.items()
        if any(f"{name}.".startswith(f"{f}.") for name in names for f in forbidden)
    } == set()


def test_only_the_table_of_benches_names_what_tests_use() -> None:
    """What is installed imports nothing of tests/; the bench harness has names, and looks for them when it is asked."""
    support = {path.stem for path in ROOT.joinpath("tests", "support").iterdir()} | {"tests"}
    found = {module: {name.split(".")[0] for name in imported(path)} & support for module, path in files().items()}
    assert {module: names for module, names in found.items() if names} == {}
    assert set(IN_CHECKOUT.values()) <= support


def test_a_decoder_needs_no_torch() -> None:
    loaded, actor = loaded_by(
        [*modules("cluster.codec"), *modules("cluster.vision"), "cluster.types"], ["cluster.decoder.running_camera"]
    )
    assert not loaded & {"torch", "transformers", "ray", "grpc", "pydantic", "cluster.models", "cluster.engine"}
    assert not actor & {"torch", "transformers", "ray"}


def test_nothing_that_starts_an_actor_loads_torch() -> None:
    """Nor does what starts them, replicas included; a gateway has Ray import the module of every actor that it looks
    for."""
    others = ("decoder", "gateway", "tier", "alerting", "replica", "serve_app")
    [loaded] = loaded_by(["actors.runtime", *(f"actors.{name}" for name in others)])
    assert not loaded & {"torch", "transformers"}


def test_control_needs_no_torch_and_no_wire() -> None:
    [loaded] = loaded_by(modules("cluster.control"))
    assert not loaded & {"torch", "transformers", "ray", "grpc", "av", "cluster.wire", "cluster.codec"}


@pytest.fixture(scope="module")
def with_torch() -> list[set[str]]:
    """What there is after torch and transformers alone, then the models, the engine, all of cluster, and at last the
    command line."""
    return loaded_by(
        ["torch", "transformers", "transformers.models.auto.modeling_auto"],
        modules("cluster.models"),
        modules("cluster.engine"),
        modules("cluster"),
        ["actors.cli", "loadtest.report", "cluster.lab.city.report"],
    )


def test_nothing_in_cluster_loads_ray_or_actors(with_torch: list[set[str]]) -> None:
    assert not with_torch[-2] & {"ray", "actors", "loadtest"}


def test_nothing_loads_matplotlib_before_a_chart_is_drawn(with_torch: list[set[str]]) -> None:
    assert "matplotlib" not in with_torch[-1]


def test_engine_and_models_know_nothing_of_the_rest(with_torch: list[set[str]]) -> None:
    baseline, *loaded, _, _ = with_torch
    for names in loaded:
        assert not names & {"ray", "grpc", "av", "pydantic", "prometheus_client", "typer"} - baseline
        assert not names & {f"cluster.{name}" for name in ("codec", "vision", "wire", "config", "control", "metrics")}


def test_no_test_module_imports_another() -> None:
    """What two of them need lies in tests/support."""
    found = {file.name: imported(file) for file in ROOT.glob("tests/**/test_*.py")}
    assert len(found) > 200
    assert not {name: others for name, names in found.items() if (others := {n for n in names if n.startswith("test")})}


def test_files_stay_short_enough_to_be_read():
    assert [path for path in files().values() if len(path.read_text().splitlines()) > 450] == []
