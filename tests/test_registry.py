"""One file and one entry make a policy: found by its name, imported when asked for, taken by configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import registry
from cluster.config import load_config
from cluster.errors import ConfigError
from cluster.vision import make_pruner

# Kind -> a policy that is there (module, class), and where a configuration names one.
KINDS = {
    "pruners": ("cluster.vision.pruners.baselines", "KeepAll", {"pruning": {"policy": "mine"}}),
    "refresh_policies": ("cluster.engine.window.refresh.counters", "All", {"window": {"refresh": "mine"}}),
    "compressors": ("cluster.memory.compress.simple", "Sliding", {"memory": {"compressor": "mine"}}),
    "organisers": ("cluster.memory.organise.simple", "Frames", {"memory": {"organiser": "mine"}}),
    "retrievers": ("cluster.memory.retrieve.nearest", "TopK", {"memory": {"retriever": "mine"}}),
    "frame_retrievals": (
        "cluster.memory.frame_retrieval",
        "ReSVFrames",
        {"memory": {"frame_retrieval": "mine"}},
    ),
    "tiers": ("cluster.memory.tiers.arena", "Arena", {"tiers": {"levels": ["mine"]}}),
    "window_orders": ("cluster.replica.window_queue", "Arrival", {"scheduling": {"order": "mine"}}),
    "families": ("cluster.models.internvl", "InternVL", {}),
    "sinks": ("cluster.alerts.sinks.log", "LogSink", {"alerts": {"sinks": [{"name": "a", "kind": "mine"}]}}),
}


@pytest.fixture(params=KINDS)
def mine(request, tmp_path, monkeypatch):
    """``(registry, configuration)`` with a policy ``mine`` from a file of its own."""
    module, name, configuration = KINDS[request.param]
    file = f"mine_{request.param}"
    (tmp_path / f"{file}.py").write_text(f"from {module} import {name}\n\n\nclass Mine({name}):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    policies = getattr(registry, request.param)
    monkeypatch.setattr(policies, "_entries", dict(policies._entries))
    policies.register("mine", f"{file}:Mine")
    return policies, configuration, file


def test_a_file_and_an_entry_are_all_it_takes(mine):
    policies, configuration, file = mine
    assert "mine" in policies.names()
    load_config(None, configuration)
    found = policies.get("mine")
    assert (found.__name__, found.__module__) == ("Mine", file)
    assert policies.get("mine") is found


def test_a_pruner_of_ones_own_prunes(tmp_path, monkeypatch):
    (tmp_path / "own_pruner.py").write_text(
        "from dataclasses import dataclass\nfrom cluster.vision.pruners.baselines import KeepAll\n\n\n"
        "@dataclass(slots=True)\nclass Own(KeepAll):\n    luma_threshold: float = 7.0\n    share: float = 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry.pruners, "_entries", dict(registry.pruners._entries))
    registry.pruners.register("own", "own_pruner:Own")
    config = load_config(None, {"pruning": {"policy": "own", "options": {"share": 0.25}}})
    pruner = make_pruner(config.pruning.policy, config.pruning.options)
    assert (pruner.luma_threshold, pruner.share) == (7.0, 0.25)
    with pytest.raises(ConfigError, match="the pruner 'own' has no parameter 'shar'; did you mean 'share'"):
        load_config(None, {"pruning": {"policy": "own", "options": {"shar": 0.25}}})


def test_an_installed_package_adds_policies_without_a_change_here(tmp_path):
    """By entry points, in a process of its own: every process of a cluster finds them."""
    (tmp_path / "theirs.py").write_text("from cluster.vision.pruners.baselines import KeepAll as Mine")
    groups = {"pruners": "pruner", "refresh_policies": "refresh_policy", "kernels": "attention_kernel"}
    groups |= {"families": "model_family", "tiers": "kv_tier", "sinks": "alert_sink", "window_orders": "window_order"}
    metadata = tmp_path / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = [f"[sightline.{group}]\nmine = theirs:Mine\n" for group in groups.values()]
    (metadata / "entry_points.txt").write_text("".join(points))
    code = (
        f"from cluster import registry; assert all('mine' in getattr(registry, kind) for kind in {list(groups)})\n"
        "from cluster.config import load_config\n"
        "config = load_config(None, {'pruning': {'policy': 'mine', 'options': {'luma_threshold': 7.0}}})\n"
        "from cluster.vision import make_pruner\n"
        "assert make_pruner(config.pruning.policy, config.pruning.options).luma_threshold == 7.0\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_a_name_is_taken_once():
    with pytest.raises(RuntimeError, match="attention kernel 'sdpa' is registered twice"):
        registry.kernels.register("sdpa", "nowhere:Nothing")


def test_every_entry_is_there():
    for name in (
        "pruners",
        "families",
        "refresh_policies",
        "kernels",
        "compressors",
        "organisers",
        "retrievers",
        "sinks",
        "tiers",
        "window_orders",
    ):
        policies = getattr(registry, name)
        assert len(policies.names()) >= 2
        for each in policies:
            assert isinstance(policies.get(each), type)


def test_names_are_known_without_importing_any_policy():
    code = (
        "import sys; from cluster import registry; names = registry.compressors.names(); assert names\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Where each kind's shared tests are; those of a family are the first of the conformance matrix.
MATRICES = (
    "vision/test_pruners.py",
    "engine/test_refresh_policies.py",
    "memory/test_compress.py",
    "memory/test_organise.py",
    "memory/test_retrieve.py",
    "memory/tiers/test_tier_matrix.py",
    "replica/test_windows.py",
    "conformance/test_conformance_matrix.py::test_nothing_pruned_equals_the_reference",
)


def test_the_shared_matrix_runs_on_a_policy_of_ones_own(tmp_path):
    """One of each from a file; the tests are those that every other policy passes."""
    lines = ["from dataclasses import replace", "from cluster import registry", "from cluster.models import presets"]
    for kind, (module, name, _) in KINDS.items():
        lines += [f"from {module} import {name}", f"class Mine_{kind}({name}): pass"]
        lines += [f"registry.{kind}.register('mine', 'own_policies:Mine_{kind}')"]
    lines += ["presets.PRESETS['tiny-mine'] = replace(presets.PRESETS['tiny-internvl3'], family='mine')"]
    (tmp_path / "own_policies.py").write_text("\n".join(lines))
    tests = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "own_policies",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rA",
        "--no-header",
    ]
    command += ["-k", "mine and not (tiny and (qwen or internvl3 or llava))", *(str(tests / each) for each in MATRICES)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tests.parent, env=environment)
    assert done.returncode == 0, done.stdout
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED")]
    for each in MATRICES:
        assert any(each.partition("::")[0] in line and "mine" in line for line in passed), each


@pytest.mark.parametrize(("cameras", "compared"), [(1000, 1), (10_000, 0)])
def test_the_names_of_a_large_fleet_are_not_compared(monkeypatch, cameras, compared):
    """Agents of a removed camera ask for it again and again, and all others wait for the controller meanwhile."""
    calls, compare = [], registry.difflib.get_close_matches
    monkeypatch.setattr(registry.difflib, "get_close_matches", lambda *a, **k: calls.append(a) or compare(*a, **k))
    hint = registry.near("cam-5x", [f"cam-{number}" for number in range(cameras)])
    assert (len(calls), "did you mean 'cam-5'" in hint) == (compared, compared == 1)
