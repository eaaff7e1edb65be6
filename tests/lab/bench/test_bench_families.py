"""``bench families``: every family is there, within its bounds."""

import json
import math
from argparse import Namespace

import torch

from cluster.engine.native.engine import NativeEngine
from cluster.lab.bench import families as families_bench
from cluster.lab.bench.harness import main
from cluster.lab.check.logits import LogitPair
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


def test_reused_kv_that_is_off_by_a_hundredth_is_seen(monkeypatch):
    step = NativeEngine.step

    def drifting(self, *given):
        answers = step(self, *given)
        for kept in (*self.pool.k, *self.pool.v):
            kept.mul_(1.01)
        return answers

    monkeypatch.setattr(NativeEngine, "step", drifting)
    found = families_bench.run(Namespace(families=["qwen2_vl"], threads=1, speed=False)).figures
    assert found["logit_diff"] > 0.01
    assert found["reuse_diff"] > 0.01


def test_logits_that_are_no_numbers_are_the_largest_difference(monkeypatch, capsys):
    pairs = [LogitPair(torch.zeros(1, 2), torch.tensor([[0.0, logit]])) for logit in (1e-6, math.nan, 1e-6)]
    for name in ("against_library", "against_fresh"):
        monkeypatch.setattr(families_bench, name, lambda *_: iter(pairs))
    assert main(["families", "--families", "qwen2_5_vl"]) == 0
    said = capsys.readouterr().out
    assert "logit_diff = nan" in said
    # One family's is not hidden behind another's.
    found = iter([1e-6, math.nan, 1e-6])
    monkeypatch.setattr(families_bench, "logit_diff", lambda _: next(found))
    assert main(["families", "--families", "qwen2_5_vl", "qwen2_vl", "internvl"]) == 0
    said = capsys.readouterr().out
    assert "logit_diff = nan" in said
    [row] = [line.split() for line in said.splitlines() if line.startswith("families") and "logit_diff" in line]
    assert row[-1] == "no"


def test_every_family_has_presets_of_both_sizes():
    for size in ("tiny", "bench"):
        assert {p.family for name, p in PRESETS.items() if name.startswith(size)} == set(families)
