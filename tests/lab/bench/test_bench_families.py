"""``bench families``: every family is there, within its bounds."""

import json

from cluster.lab.bench.harness import main
from cluster.models.presets import PRESETS
from cluster.registry import families


def test_every_family_is_within_its_bounds(tmp_path, capsys):
    out = tmp_path / "families.json"
    assert main(["families", "--json", str(out)]) == 0
    body = json.loads(out.read_text())
    assert [row["family"] for row in body["rows"]] == list(families)
    assert len(body["rows"]) >= 6
    for row in body["rows"]:
        assert 0 < row["logit_diff"] <= 2e-4, row
        assert row["reuse_diff"] <= 2e-4, row
        assert row["lines_per_family"] <= 260, row
    assert set(body["figures"]) == {"logit_diff", "reuse_diff", "lines_per_family"}
    assert "logit_diff = " in capsys.readouterr().out


def test_every_family_has_presets_of_both_sizes():
    for size in ("tiny", "bench"):
        assert {p.family for name, p in PRESETS.items() if name.startswith(size)} == set(families)
