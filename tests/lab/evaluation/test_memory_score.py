"""What counts as right, and accuracies against hand-computed cases."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.evaluation.memory.questions import Question, multiple_choice
from cluster.lab.evaluation.memory.results import (
    GradedAnswer,
    accuracy_by_kind,
    accuracy_drop,
    chosen_option,
    credit,
    first_word_matches,
    word_overlap,
)


@pytest.mark.parametrize(
    ("said", "truth", "right"),
    [
        ("yes", "yes", True),
        ("Yes, a red one did.", "yes", True),
        ("  YES!", "yes", True),
        ("no", "yes", False),
        ("yesterday", "yes", False),
        ("", "yes", False),
        ("3", "three", True),
        ("Three vehicles.", "three", True),
        ("13", "three", False),
        ("A person came first.", "person", True),
        ("The vehicle", "person", False),
        ("²", "two", False),
    ],
)
def test_the_first_word_decides(said, truth, right):
    assert first_word_matches(said, truth) is right


@pytest.mark.parametrize(
    ("said", "index"),
    [
        ("B", 1),
        ("(b)", 1),
        ("C. Nothing", 2),
        ("B: A red car", 1),
        ("The answer is (C).", 2),
        ("The correct answer: A", 0),
        ("option D", 3),
        ("B because of the colour", 1),
        ("I think the answer is B because it is red", 1),
        ("The answer is a red car", 1),
        ("A man in a red car", 1),
        ("A car", 0),
        ("It was a red car.", 1),
        ("nothing happened", 2),
        ("a red car and nothing else", None),
        ("a lorry", None),
        ("H", None),
        ("", None),
    ],
)
def test_an_option_is_named_by_letter_or_text(said, index):
    assert chosen_option(said, ("a car", "a red car", "Nothing", "two cars")) == index


@given(st.lists(st.sampled_from("abcd"), max_size=6), st.lists(st.sampled_from("abcd"), max_size=6))
def test_overlap_is_symmetric_within_bounds_and_one_for_the_same_words(ours, theirs):
    said, truth = (" ".join(f"w{letter}" for letter in some) for some in (ours, theirs))
    assert word_overlap(said, truth) == word_overlap(truth, said)
    assert 0 <= word_overlap(said, truth) <= 1
    assert (word_overlap(said, truth) == 1) == (sorted(ours) == sorted(theirs) and bool(ours))


def test_overlap_by_hand():
    # Two words shared of two said and three that are right.
    assert word_overlap("The red cup", "a red plastic cup") == pytest.approx(2 * 2 / 5)


def test_credit_is_the_share_of_turns():
    talk = Question("multi-turn", ("One?", "Two?"), ("yes", "no"), 1.0)
    assert [credit(talk, said) for said in (("yes", "no"), ("yes", "yes"), ("no", "yes"))] == [1.0, 0.5, 0.0]
    choice = multiple_choice("plot", "Which?", ("this", "that"), 1, 1.0)
    assert (credit(choice, ["B"]), credit(choice, ["this"])) == (1.0, 0.0)
    assert credit(Question("open", ("What?",), ("a red cup",), 1.0), ["red"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="1 answers to 2 turns"):
        credit(talk, ["yes"])


def judged(credits, kind="needle", video="v"):
    return [GradedAnswer(video, number, kind, value) for number, value in enumerate(credits)]


def test_accuracy_by_kind_and_of_all():
    rows = [*judged([1, 1, 1, 0]), *judged([0, 0, 1], "order", "w")]
    found = accuracy_by_kind(rows)
    assert [round(found[kind].value, 4) for kind in ("all", "needle", "order")] == [0.5714, 0.75, 0.3333]
    # Nobody knows what a third video would have said.
    assert all(math.isnan(end) for measured in found.values() for end in measured[1:])


def one_each(credits):
    """One question about each of so many videos."""
    return [row for number, value in enumerate(credits) for row in judged([value], video=f"v{number:03}")]


def test_the_interval_of_videos_with_a_question_each_is_the_binomials():
    found = accuracy_by_kind(one_each([1] * 80 + [0] * 20))["all"]
    spread = 1.96 * math.sqrt(0.8 * 0.2 / 100)
    assert (found.low, found.high) == pytest.approx((0.8 - spread, 0.8 + spread), abs=0.012)


def test_ten_videos_of_one_opinion_each_are_ten_samples_and_not_a_hundred():
    alike = [row for video in range(10) for row in judged([video < 5] * 10, video=f"v{video}")]
    single = one_each([1] * 50 + [0] * 50)
    wide, narrow = (accuracy_by_kind(rows)["all"] for rows in (alike, single))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_a_hundred_questions_about_nine_videos_have_no_interval_and_about_ten_they_have():
    rows = [row for video in range(10) for row in judged([1, 0] * 50, video=f"v{video}")]
    found = accuracy_by_kind(rows[:900])["all"]
    assert found.value == 0.5
    assert np.isnan(found[1:]).all()
    assert accuracy_by_kind(rows)["all"] == pytest.approx((0.5, 0.5, 0.5))


def test_a_drop_is_paired():
    full, other = one_each([1, 1, 1, 1, 0, 0, 0, 0] * 5), one_each([1, 1, 1, 0, 0, 0, 0, 0] * 5)
    found = accuracy_drop(full, other)["all"]
    assert found.value == pytest.approx(0.125)
    # A difference that never goes the other way has no interval below zero, however much both vary.
    assert found.low >= 0
    assert accuracy_drop(full, full)["all"] == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="same questions"):
        accuracy_drop(full, other[::-1])


def test_too_little_to_tell_has_no_interval():
    found = accuracy_by_kind(judged([1, 0]))
    assert found["all"].value == 0.5
    assert np.isnan(found["all"][1:]).all()
    assert math.isnan(accuracy_by_kind([])["all"].value)
