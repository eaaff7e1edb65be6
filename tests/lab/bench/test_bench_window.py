"""The window bench end to end on a tiny model: what it counts, not how fast it is."""

import argparse
import json

import pytest

from cluster.lab.bench import batch
from cluster.lab.bench.frames import clip_names, prune_clip, read_clip, span_seconds
from cluster.lab.bench.harness import main
from cluster.lab.scenes.street_clips import make_clip
from cluster.types import PatchGeometry

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2, max_pixels=112 * 112)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "street-1.mp4"
    make_clip("street", path, seconds=6, size=(160, 96))
    return path


def test_a_short_clip_is_looped_and_a_long_one_cut(clip):
    looped = read_clip(clip, GEOMETRY, fps=2, at_least=14)
    assert looped.seconds >= 14
    assert [frame.pts for frame in looped.frames] == sorted({frame.pts for frame in looped.frames})
    assert looped.change_s > 0
    assert len(read_clip(clip, GEOMETRY, fps=2, at_least=2, at_most=4).frames) == 8


def test_streams_together_and_one_by_one_are_each_first_in_every_other_window(monkeypatch):
    """A machine that slows down, or a cache that the first has filled, slows neither alone."""
    ran, step = [], batch._step

    def noted(engine, batches, seconds):
        ran.append("together" if len(batches) == 1 else "alone")
        return step(engine, batches, seconds)

    monkeypatch.setattr(batch, "_step", noted)
    monkeypatch.setattr(batch, "SIDES", (56,))
    parser = argparse.ArgumentParser()
    batch.add_arguments(parser)
    result = batch.run(parser.parse_args(["--model", "tiny-qwen2_5_vl", "--streams", "2", "--windows", "4"]))
    assert result.figures["batch_speedup"] > 0
    turns = [tuple(ran[index : index + 2]) for index in range(0, 10, 2)]
    assert sorted(turns[1:]) == [("alone", "together")] * 2 + [("together", "alone")] * 2
    assert turns[1] != turns[2]


def test_nothing_pruned_keeps_every_token(clip):
    frames = read_clip(clip, GEOMETRY, fps=2, at_least=6)
    whole, kept = prune_clip(frames, "a", "none"), prune_clip(frames, "a", "replenish")
    assert all(sample.complete for sample in whole.samples)
    assert sum(s.tokens for s in kept.samples) < sum(s.tokens for s in whole.samples)
    # The camera sends 12.5 frames a second: the one due at 5 s is the one shown at 5.04 s.
    assert span_seconds(whole.samples) == pytest.approx(len(whole.samples), abs=1 / 12.5)


def test_clips_of_one_name_get_figures_of_their_own(tmp_path):
    names = [name for name, _ in clip_names([tmp_path / "a-b.mp4", tmp_path / "x" / "a-b.mp4", tmp_path / "c.mp4"])]
    assert names == ["a_b", "a_b_2", "c"]


def test_bench_counts_what_each_policy_computes(clip, tmp_path, capsys):
    out = tmp_path / "window.json"
    options = ["--window", "8", "--stride", "2", "--windows", "3", "--policies", "anchors", "all", "none", "random"]
    assert main(["window", "--model", "tiny-qwen2_5_vl", "--clips", str(clip), "--json", str(out), *options]) == 0
    body = json.loads(out.read_text())
    rows = {row["policy"]: row for row in body["rows"]}
    assert set(rows) == {"full", "anchors", "anchors, ahead", "all", "none", "random"}
    assert {row["windows"] for row in rows.values()} == {3}
    assert rows["full"]["kept"] == rows["full"]["tokens_full"]
    assert rows["none"]["refreshed"] == 0
    assert rows["none"]["computed"] < rows["all"]["computed"] < rows["full"]["computed"]
    assert rows["all"]["refresh_diff"] == 0
    assert rows["anchors, ahead"]["computed"] == rows["anchors"]["computed"]
    assert rows["anchors, ahead"]["gflops"] == rows["anchors"]["gflops"]
    assert rows["none"]["gflops"] <= rows["anchors"]["gflops"] <= rows["full"]["gflops"]
    assert set(body["figures"]) == {"speedup_street_1", "decision_overhead", "end_latency_share"}
    assert "speedup_street_1 = " in capsys.readouterr().out
