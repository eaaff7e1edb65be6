"""What is made from values.yaml is up to date, and the generator says what is missing."""

import importlib.util
import json
import subprocess
import sys

import pytest
from chart_parts import CHART, ROOT

SCRIPT = ROOT / "deploy" / "helm" / "generate.py"
spec = importlib.util.spec_from_file_location("chart_generate", SCRIPT)
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


def test_schema_and_readme_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_value_is_in_the_table_once() -> None:
    values = generate.read_values((CHART / "values.yaml").read_text())
    readme = (CHART / "README.md").read_text()
    for value in values:
        assert readme.count(f"| `{value.path}` |") == 1


def test_values_become_a_schema_and_a_table() -> None:
    text = """
# What it is.
# @schema {"minimum": 1}
count: 2
# A section.
inner:
  # How it
  # is named.
  name: ""
"""
    values = generate.read_values(text)
    assert [value.path for value in values] == ["count", "inner", "inner.name"]
    assert generate._leaf(values[0]) == {"type": "integer", "minimum": 1}
    assert values[2].description == "How it is named."
    assert generate.table(values).splitlines()[2:] == [
        "| `count` | `2` | What it is. |",
        "| `inner` |  | A section. |",
        '| `inner.name` | `""` | How it is named. |',
    ]
    with pytest.raises(SystemExit, match="count has no description"):
        generate.read_values("count: 1\n")


def test_what_the_chart_owns_is_in_the_configuration() -> None:
    """A key that was renamed there must be renamed here."""
    configuration = json.loads((ROOT / "configs" / "schema.json").read_text())
    for section, keys in generate.OWNED.items():
        name = configuration["properties"][section]["$ref"].rpartition("/")[2]
        assert set(keys) <= configuration["$defs"][name]["properties"].keys()
