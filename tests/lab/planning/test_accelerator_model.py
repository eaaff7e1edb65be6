"""The performance model against hand counts, its own limits, and the paper's numbers."""

import dataclasses
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.lab.planning import figures, report
from cluster.lab.planning.accelerator import PARAMETERS, platforms, predict
from cluster.lab.planning.figures import SIZES, compare, mean_error, run
from cluster.lab.planning.report import rows
from cluster.lab.planning.workload import frame, methods, models, question, token
from cluster.lab.report.page import write_page

LLAMA = models.get("llama3-8b")
PAIRS = st.tuples(st.sampled_from(platforms.names()), st.sampled_from(methods.names()))


def at(platform, method, step, **changed):
    return predict(platforms.get(platform), methods.get(method), step, dataclasses.replace(PARAMETERS, **changed))


def test_llama_has_the_published_sizes():
    assert LLAMA.read_weights + 4096 * 128256 == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA.kv_bytes == 131072
    assert LLAMA.vision.flops == pytest.approx(0.38e12, rel=0.02)
    assert LLAMA.vision.weight_bytes / 2 == pytest.approx(0.302e9, rel=1e-2)


def test_the_power_of_vrex_is_the_sum_of_its_parts():
    for name, rest in (("vrex8", 2.12), ("vrex48", 30.4)):
        machine = platforms.get(name)
        assert machine.memory_watts == pytest.approx(rest, abs=0.1)
        assert machine.core_watts + machine.memory_watts + 3 * machine.lanes == pytest.approx(machine.watts)


def test_a_token_without_a_cache_costs_the_reading_of_the_weights():
    found = at("a100", "resident", token(LLAMA, 1))
    assert found.linear == pytest.approx(2 * LLAMA.read_weights / (1935e9 * 0.8))
    assert found.vision == found.fetch == found.selection == found.host == 0
    assert found.latency == pytest.approx(found.linear, rel=1e-3)


def test_flexgen_fetches_everything_once_over_the_link():
    found = at("a100", "flexgen", token(LLAMA, 40_000, batch=2), link=1.0, overlap=0.0)
    assert found.link_bytes == 2 * 40_000 * 131072
    assert found.fetch == pytest.approx(2 * 40_000 * 131072 / 32e9)
    assert found.latency == pytest.approx(found.linear + found.attention + found.host + found.fetch)


def test_reads_of_the_size_of_the_overhead_halve_the_link():
    run_bytes = 32 * LLAMA.kv_layer_bytes / 2
    whole = at("vrex8", "resv-dre", frame(LLAMA, 40_000), request_bytes=0)
    halved = at("vrex8", "resv-dre", frame(LLAMA, 40_000), request_bytes=run_bytes)
    assert halved.fetch == pytest.approx(2 * whole.fetch)


def test_the_units_cycles_are_those_of_the_paper_s_sizes():
    found = at("vrex8", "resv-kvpu", frame(LLAMA, 40_000))
    clusters, machine = 1250, platforms.get("vrex8")
    hamming = 32 * 10 * 8 * clusters * 32 / 16 / (8 * 800e6)
    scores = 32 * 10 * 32 * clusters
    thresholds = scores * 1.16 / 16 / (8 * 800e6)
    products = scores * 256 / (machine.flops * machine.engine.attention)
    assert found.selection == pytest.approx(hamming + thresholds + products)


def test_gpu_energy_is_power_times_time_less_what_waiting_saves():
    found = at("a100", "flexgen", frame(LLAMA, 40_000), waiting=0.5)
    assert found.energy == pytest.approx(300 * (found.latency - found.exposed_fetch / 2))
    assert found.energy < 300 * found.latency


@given(PAIRS, st.integers(1, 200_000), st.integers(1, 8), st.booleans())
def test_more_cache_and_more_batch_never_cost_less(pair, cache, batch, text):
    make = token if text else frame
    one = at(*pair, make(LLAMA, cache, batch))
    for more in (at(*pair, make(LLAMA, 2 * cache, batch)), at(*pair, make(LLAMA, cache, batch + 1))):
        assert more.latency >= one.latency
        assert more.energy >= one.energy * (1 - 1e-9)


@given(PAIRS, st.integers(1, 200_000), st.integers(1, 8))
def test_parts_add_up_and_power_stays_within_the_machine_s(pair, cache, batch):
    found = at(*pair, frame(LLAMA, cache, batch))
    computing = found.vision + found.linear + found.attention + found.host
    assert max(computing, found.fetch, found.selection) <= found.latency * (1 + 1e-9)
    assert found.latency <= (computing + found.selection + found.fetch) * (1 + 1e-9)
    assert 0 <= found.exposed_fetch <= found.fetch
    assert 0 < found.energy / found.latency <= platforms.get(pair[0]).watts * (1 + 1e-9)


def test_the_paper_s_orders_hold():
    """Section VI.B: token-level selection loses to FlexGen on frames, frames' selection wins in the end; the engine
    always wins; software ReSV is worth it on the edge only when the cache is long."""
    for cache in SIZES:
        flexgen, infinigenp, dre = (
            run(*pair, "frame", cache).latency
            for pair in (("agx-orin", "flexgen"), ("agx-orin", "infinigenp"), ("vrex8", "resv-dre"))
        )
        assert dre < flexgen < infinigenp
    long = {m: run("agx-orin", m, "frame", 40_000).latency for m in ("flexgen", "rekv", "resv")}
    assert long["resv"] < long["rekv"] < long["flexgen"]
    assert run("agx-orin", "resv", "frame", 1_000).latency > run("agx-orin", "flexgen", "frame", 1_000).latency


def test_only_a_resident_cache_runs_out_of_memory():
    assert at("agx-orin", "resident", frame(LLAMA, 10_000)).fits
    assert not at("agx-orin", "resident", frame(LLAMA, 200_000)).fits
    assert at("agx-orin", "resv", frame(LLAMA, 200_000)).fits


def test_the_error_stays_within_what_is_stated():
    comparisons = compare()
    assert mean_error(comparisons) <= figures.BOUND
    assert mean_error(comparisons, calibrated=True) <= 0.10
    assert mean_error(comparisons, calibrated=False) <= 0.45
    assert len({(each.where, each.what) for each in comparisons}) == len(comparisons)


def test_the_error_sees_a_wrong_parameter(monkeypatch):
    wrong = functools.partial(predict, parameters=dataclasses.replace(PARAMETERS, kept=0.0))
    monkeypatch.setattr(figures, "predict", wrong)
    assert mean_error(compare()) > figures.BOUND


def test_end_to_end_is_frames_question_and_answer():
    whole, prefill = figures.end_to_end("a100", "flexgen", 20_000)
    a_frame, a_token = (at("a100", "flexgen", make(LLAMA, 20_000)).latency for make in (frame, token))
    asked = at("a100", "flexgen", question(LLAMA, 20_000, 1, 25)).latency
    assert prefill == pytest.approx(26 * a_frame + asked)
    assert whole == pytest.approx(prefill + 39 * a_token)


@pytest.mark.parametrize("values", [(0, 1, 10), (1000, 0, 10), (1000, 1, 0)])
def test_lengths_below_one_are_refused(values):
    cache, batch, tokens = values
    with pytest.raises(ConfigError, match="at least 1"):
        frame(LLAMA, cache, batch, tokens)


@pytest.mark.parametrize(("registry", "known"), [(platforms, "agx-orin"), (methods, "flexgen"), (models, "llama3-8b")])
def test_unknown_names_list_the_known_ones(registry, known):
    with pytest.raises(ConfigError, match=known):
        registry.get("abacus")


def test_a_page_draws_each_gpu_with_the_vrex_of_its_place_and_leaves_out_what_does_not_fit(tmp_path):
    machines = [platforms.get(name) for name in ("agx-orin", "vrex8", "vrex48")]
    chosen = [methods.get(name) for name in ("resident", "resv-dre")]
    found = rows(machines, chosen, LLAMA, [1_000, 400_000], 1, None)
    plan = report.page(found, LLAMA, 1)
    assert write_page(plan, tmp_path, "plan") == tmp_path / "plan.html"
    assert len(plan.charts) == len(list(tmp_path.glob("*.svg"))) == 5
    drawn = (tmp_path / "frame-latency-agx-orin.svg").read_text()
    assert "V-Rex8 + ReSV + DRE" in drawn
    assert "V-Rex48" not in drawn
    assert not any(word in (tmp_path / "plan.html").read_text() for word in ("src=", "href=", "url(", "http"))
    page = (tmp_path / "plan.md").read_text()
    assert page.count("does not fit its memory") == 2
    assert "V-Rex48 | ReSV + DRE" in page
    assert "AGX Orin * | ReSV + DRE" in page
