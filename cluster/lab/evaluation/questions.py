"""Whether a checkpoint is one that these questions can be put to, and the thresholds its answers are judged by."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.errors import ModelError
from cluster.lab.evaluation.calibration import choose_threshold
from cluster.lab.evaluation.results import Results
from cluster.models.base import VisionLanguageModel

DEFAULT_THRESHOLD = 0.5


def check_questions(model: VisionLanguageModel, name: str, questions: Mapping[str, str]) -> None:
    """Refuse a checkpoint that was taught other questions than the evaluator asks.

    Raises:
        ModelError: its ``sightline.json`` lacks a kind of event or words it otherwise, or its tokenizer cannot write a
            question.
    """
    known = model.settings.questions
    if not known:
        raise ModelError(
            f"model {name!r} does not say which questions it was trained on (its folder has no sightline.json with "
            "'questions'), so its answers on these scenes would mean nothing; name a model trained on them, or bring "
            "your own footage with --dataset"
        )
    for kind, text in questions.items():
        if kind not in known:
            raise ModelError(f"model {name!r} was not trained on {kind!r}; it knows: {', '.join(sorted(known))}")
        if known[kind] != text:
            raise ModelError(f"model {name!r} was trained on {known[kind]!r} for {kind!r}, the evaluator asks {text!r}")
        written = model.tokenizer.decode(model.tokenizer(text, add_special_tokens=False)["input_ids"])
        if written.split() != text.split():
            raise ModelError(
                f"the tokenizer of model {name!r} reads {text!r} as {written!r}: it is not the one it was trained with"
            )


def thresholds_of(
    model: VisionLanguageModel, kinds: tuple[str, ...], validation: Results | None = None
) -> tuple[dict[str, float], str]:
    """The threshold of every kind, and in words where it comes from.

    The model's own where it has one, so that what is measured is what an operator gets; else the one chosen for full
    computation on validation results; else 0.5.
    """
    own = {kind: model.settings.threshold_of(kind) for kind in kinds}
    told = {kind: value for kind, value in own.items() if value is not None}
    if len(told) == len(kinds):
        return told, "the model's own"
    if validation is not None and (validation.truth & validation.judged).any():
        chosen, _ = choose_threshold(validation.scores(validation.full), validation.truth, validation.judged)
        return {kind: told.get(kind, chosen) for kind in kinds}, "chosen on the validation scenes"
    return {kind: told.get(kind, DEFAULT_THRESHOLD) for kind in kinds}, "the default: nothing says better"
