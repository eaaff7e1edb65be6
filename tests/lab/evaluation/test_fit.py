import json

import numpy as np
import pytest

from cluster.errors import ConfigError, ModelError
from cluster.lab.evaluation.calibration import CalibrationFit, fit_answers, mean_in_logits, platt, write_calibration
from cluster.lab.evaluation.memory.questions import Question
from cluster.lab.evaluation.memory.results import AnswerRecord, GradedAnswer, SettingResult
from cluster.lab.evaluation.memory.run import Footage, MemoryResults
from cluster.lab.evaluation.memory.settings import FULL, ours
from cluster.models.settings import ModelSettings


def test_platt_finds_the_slope_and_bias_that_drew_the_truth():
    rng = np.random.default_rng(0)
    margins = rng.normal(0, 3, 40_000)
    truth = rng.random(40_000) < 1 / (1 + np.exp(-(0.5 * margins - 1.2)))
    assert platt(margins, truth) == pytest.approx((0.5, -1.2), abs=0.04)


def test_platt_turns_round_scores_that_are_wrong_way_round_and_is_flat_on_noise():
    rng = np.random.default_rng(1)
    margins = rng.normal(0, 1, 5000)
    assert platt(margins, margins + rng.normal(0, 1, 5000) < 0)[0] < 0
    assert platt(margins, rng.random(5000) < 0.3)[0] == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("shift", [-40.0, -8.0, -2.0, 2.0, 8.0, 40.0])
def test_scores_far_from_their_middle_are_fitted_too(shift):
    rng = np.random.default_rng(2)
    margins = rng.normal(0, 3, 5000)
    truth = rng.random(5000) < 1 / (1 + np.exp(-(0.8 * margins + 2.0)))
    slope, bias = platt(margins, truth)
    # The same margins, moved: the likelihood is the same function, moved.
    moved, moved_bias = platt(margins + shift, truth)
    assert (moved, moved_bias + shift * moved) == pytest.approx((slope, bias), abs=1e-4)


def test_a_kinds_threshold_lies_halfway_to_the_common_one_in_logits():
    assert mean_in_logits(0.5, 0.5) == pytest.approx(0.5)
    assert mean_in_logits(0.2, 0.8) == pytest.approx(0.5)
    assert mean_in_logits(1 / (1 + np.exp(3)), 1 / (1 + np.exp(1))) == pytest.approx(1 / (1 + np.exp(2)))


def test_separable_scores_keep_finite_parameters():
    slope, bias = platt(np.array([-2.0, -1.0, 1.0, 2.0]), np.array([False, False, True, True]))
    assert np.isfinite([slope, bias]).all()
    assert slope > 0


def test_answers_about_events_are_fitted_from_what_was_said_and_nothing_else():
    rng = np.random.default_rng(2)
    margins = rng.normal(0, 3, 5000)
    truth = rng.random(5000) < 1 / (1 + np.exp(-(0.8 * margins + 2.0)))
    # The model was calibrated before: 1 / 4 of the margin, less 1.
    scores = 1 / (1 + np.exp(-(margins / 4 - 1)))
    asked = [Question("event", ("Did someone fall?",), ("yes" if yes else "no",), 9.0) for yes in truth] + [
        Question("needle", ("Was there a red vehicle?",), ("yes",), 9.0)
    ] * 50
    before = ModelSettings(answer_temperature=4.0, answer_bias=-1.0)

    def answers(setting, given, count):
        said = [
            AnswerRecord(GradedAnswer("v", number, question.kind, 0.0), ("no",), 0, 9.0, 0, 0, 0, 0, None, (score,))
            for number, (question, score) in enumerate(zip(asked, [*given, *[0.0] * 50], strict=True))
        ]
        return SettingResult(setting, tuple(said[:count]))

    def fitted(*results, count=len(asked)):
        return fit_answers(MemoryResults(results, (Footage("v", "v.mp4", tuple(asked[:count])),), (), 0), before)

    whole = answers(FULL, scores, len(asked))
    temperature, bias = fitted(whole)
    assert (1 / temperature, bias) == pytest.approx((0.8, 2.0), abs=0.15)
    with pytest.raises(ConfigError, match="all have the same answer"):
        fitted(answers(FULL, scores, 1), count=1)
    # A smaller memory whose margins lie 2 lower needs 1.6 more; one fit for both lies between.
    smaller = answers(ours(1 / 8), 1 / (1 + np.exp(-((margins - 2) / 4 - 1))), len(asked))
    assert fitted(smaller)[1] == pytest.approx(3.6, abs=0.25)
    assert bias + 0.4 < fitted(whole, smaller)[1] < fitted(smaller)[1] - 0.4


def test_a_fit_changes_its_own_entries_only(tmp_path):
    (tmp_path / "sightline.json").write_text(
        json.dumps({"window_s": 20.0, "questions": {"fall": "?"}, "thresholds": {}})
    )
    write_calibration(tmp_path, CalibrationFit(1.5, -0.25, 0.4, 0.9, {"fall": 0.71}))
    known = ModelSettings.load(tmp_path)
    assert (known.threshold_of("fall"), known.threshold_of("fight")) == (0.71, 0.4)
    assert (known.window_s, known.score_temperature, known.score_bias, known.threshold) == (20.0, 1.5, -0.25, 0.4)
    assert dict(known.questions) == {"fall": "?"}


def test_a_folder_without_settings_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no sightline\.json"):
        write_calibration(tmp_path, CalibrationFit(1.0, 0.0, 0.5, 0.0))
