"""How long a window will make a step: by tokens, by costs, and corrected by what steps took."""

import pytest
from scheduling_parts import costs
from worker_parts import spec

from cluster.replica.steps import OpenStream, StepTimeEstimator
from cluster.types import Answer, TokenCount


def answer(stream: str, computed: int = 100, *, gated: bool = False, question: str = "q") -> Answer:
    tokens = TokenCount(full=200, kept=100, reused=0, refreshed=0, new=computed, query=0, encoded=computed)
    return Answer(stream, 0, 0, 1, question, 0.5, True, "", gated, tokens)


def test_without_costs_a_token_is_worth_what_steps_took() -> None:
    pace = StepTimeEstimator()
    assert pace.expected_s("a") == 0.0, "nothing is known: nothing is held back"
    pace.observe([answer("a", 100), answer("b", 300)], 4.0)
    assert pace.expected_s("a") == pytest.approx(1.0)
    assert pace.expected_s("b") == pytest.approx(3.0)


def test_with_costs_a_window_is_predicted_and_corrected() -> None:
    pace = StepTimeEstimator(costs(window_s=0.5, step_s=1.0))
    pace.observe([answer("a")], 1.5)
    assert pace.expected_s("a") == pytest.approx(0.5)
    for _ in range(60):
        pace.observe([answer("a")], 3.0)
    assert pace.expected_s("a") == pytest.approx(1.0, rel=0.01)


def test_a_window_of_several_questions_counts_once() -> None:
    once, twice = StepTimeEstimator(), StepTimeEstimator()
    once.observe([answer("a")], 1.0)
    twice.observe([answer("a", question="p"), answer("a", question="q")], 1.0)
    assert once.expected_s("a") == twice.expected_s("a")


def test_tokens_of_gated_windows_are_in_the_total_alone() -> None:
    stream = OpenStream(spec("a"))
    stream.answered([answer("a", question="q"), answer("a", question="r")])
    stream.answered([answer("a", gated=True)])
    again = OpenStream.opened(stream.spec, stream.report())
    again.answered([answer("a")])
    found = again.report()
    tokens = answer("a").tokens
    assert (found.counts["tokens_full"], found.counts["tokens_kept"]) == (3 * tokens.full, 3 * tokens.kept)
    assert found.computed == {
        "tokens_full": 2 * tokens.full,
        "tokens_kept": 2 * tokens.kept,
        "windows_resumed": 0,
    }
    for gated in (False, True, True, False, False, True, False):
        again.answered([answer("a", gated=gated)])
    assert again.report().computed["windows_resumed"] == 2


def test_gated_windows_cost_nothing_and_teach_nothing_of_speed() -> None:
    pace = StepTimeEstimator()
    pace.observe([answer("a")], 1.0)
    for _ in range(8):
        pace.observe([answer("a", gated=True)], 1e-5)
    assert pace.expected_s("a") < 0.01
    pace.observe([answer("a")], 1.0)
    assert pace.expected_s("a") > 0.4


def test_a_camera_that_is_gone_is_as_any_other() -> None:
    pace = StepTimeEstimator()
    for _ in range(200):
        pace.observe([answer("a", 100), answer("b", 300)], 4.0)
    pace.remove_stream("a")
    assert pace.expected_s("a") == pace.expected_s("never seen") == pytest.approx(2.0, rel=0.2)
