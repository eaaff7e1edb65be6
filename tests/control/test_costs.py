"""Cost models: hand-computed steps, fits that find what made the data, and files that are refused by name."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_parts import costs

from cluster.control.costs import CostModel, WindowWork, fit, load, names, save
from cluster.errors import ConfigError, SightlineError
from cluster.lab.bench.cost import PLATFORMS, platform_costs, unseen_error
from cluster.types import TokenCount

NAMES = ("step_s", "window_s", "encoded_s", "computed_s", "attended_s")


def test_a_step_costs_its_own_seconds_and_those_of_its_windows() -> None:
    model = costs(step_s=1.0, window_s=0.5, encoded_s=0.1, computed_s=0.01, attended_s=0.001)
    assert model.seconds([WindowWork(2, 30, 400), WindowWork(0, 10, 0)]) == pytest.approx(1 + 1.0 + 0.2 + 0.4 + 0.4)
    assert model.seconds([]) == 0


def test_work_of_a_window_counted_by_hand() -> None:
    tokens = TokenCount(full=200, kept=100, reused=60, refreshed=10, new=30, query=5, encoded=30)
    found = WindowWork.from_counts(tokens)
    # New ones see 70 older and 15 of their own on average, refreshed ones half of the 70, questions all 100.
    assert found == WindowWork(30, 45, 30 * 85 + 10 * 35 + 5 * 100)


@given(
    st.lists(st.floats(0, 1e-2), min_size=5, max_size=5).filter(lambda found: sum(found[1:]) > 1e-4),
    st.integers(0, 100),
)
@settings(deadline=None, max_examples=40)
def test_a_fit_predicts_the_steps_it_was_made_from(coefficients, seed) -> None:
    made = costs(**dict(zip(NAMES, coefficients, strict=True)))
    random = np.random.default_rng(seed)
    steps = []
    for number in range(40):
        works = [WindowWork(*random.uniform(1, 50, 3)) for _ in range(1 + number % 8)]
        steps.append((works, made.seconds(works)))
    found = fit(steps, model="m", device="d", source="s")
    assert all(getattr(found, name) >= 0 for name in NAMES)
    for works, seconds in steps:
        assert found.seconds(works) == pytest.approx(seconds, rel=1e-4)
    assert found.error < 1e-4


def test_the_error_is_of_mixes_that_the_fit_has_not_seen() -> None:
    """Every fifth mix takes twice as long as the others' law says: with any of its steps in the fit, less would be
    seen of that."""
    made = costs(step_s=0.01, encoded_s=1e-4)
    random = np.random.default_rng(4)
    mixes = []
    for number in range(24):
        steps = [[WindowWork(*random.uniform(10, 500, 3)) for _ in range(1 + number % 8)] for _ in range(5)]
        mixes.append([(works, made.seconds(works) * (1 if number % 5 else 2)) for works in steps])
    assert unseen_error(mixes, model="m", device="d", source="s") == pytest.approx(0.5, abs=1e-3)


def test_a_fit_has_no_negative_coefficient_and_tells_its_error_and_spread() -> None:
    random = np.random.default_rng(3)
    truth = costs(step_s=0.01, window_s=0.0, encoded_s=1e-4, computed_s=5e-5)
    steps = []
    for number in range(400):
        works = [WindowWork(*random.uniform(10, 500, 3)) for _ in range(1 + number % 8)]
        steps.append((works, truth.seconds(works) * float(np.exp(random.normal(0, 0.2)))))
    found = fit(steps, model="m", device="d", source="s")
    assert min(getattr(found, name) for name in NAMES) >= 0
    assert found.spread == pytest.approx(0.2, abs=0.03)
    # The median of |N(0, 0.2)| is 0.135.
    assert found.error == pytest.approx(0.135, abs=0.03)


def test_steps_that_say_nothing_are_refused() -> None:
    step = ([WindowWork(1, 1, 1)], 1.0)
    with pytest.raises(ConfigError, match="at least 8 timed steps, not 3"):
        fit([step] * 3, model="m", device="d", source="s")
    with pytest.raises(ConfigError, match="a positive duration"):
        fit([step] * 8 + [([], 1.0)], model="m", device="d", source="s")


@pytest.mark.parametrize(("name", "value"), [("step_s", -1.0), ("window_s", float("nan")), ("computed_s", "fast")])
def test_numbers_that_cannot_be_are_refused(name, value) -> None:
    with pytest.raises(ConfigError, match=name):
        costs(**{name: value})


def test_windows_that_cost_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="positive cost per window"):
        costs(window_s=0.0, step_s=1.0)


def test_a_file_comes_back_as_it_was(tmp_path) -> None:
    save(costs(step_s=0.25), tmp_path / "c.json")
    assert load(tmp_path / "c.json") == costs(step_s=0.25)
    with pytest.raises(SightlineError, match="cannot write"):
        save(costs(), tmp_path / "none" / "c.json")


def test_files_that_are_no_cost_model_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"there is no cost model 'h1000'.*qwen2.5-vl-7b-h100"):
        load("h1000")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({"model": "m"}))
    with pytest.raises(ConfigError, match="not a cost model"):
        load(tmp_path / "a.json")


def test_another_models_costs_are_refused_by_name_with_how_to_make_them() -> None:
    costs().check("made-up")
    with pytest.raises(ConfigError, match=r"'made-up'.*not of 'other'.*sightline bench cost --model other"):
        costs().check("other")


def test_every_shipped_model_loads_and_those_of_gpus_are_what_the_code_computes() -> None:
    assert set(names()) == {"demo-cpu", *(f"qwen2.5-vl-7b-{name}" for name in PLATFORMS)}
    for name in names():
        assert isinstance(load(name), CostModel)
    for name in PLATFORMS:
        assert load(f"qwen2.5-vl-7b-{name}") == platform_costs(name)


def test_the_h100_is_near_what_nvidia_published_for_it() -> None:
    # 51 streams in FP8, which has twice BF16's peak: a chunk of 80 frames at 448 x 448 (256 tokens for two frames)
    # every ten seconds, encoded and computed in full with a question of 40 tokens.
    h100, tokens = load("qwen2.5-vl-7b-h100"), 80 / 2 * 256
    work = WindowWork.from_layout(kept=tokens, new=tokens, refreshed=0.0, query=40.0, encoded=tokens)
    assert 2 * 10.0 / (h100.window_seconds(work) + h100.step_s / 8) == pytest.approx(51, rel=h100.error)
