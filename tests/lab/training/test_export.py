"""What is exported loads like any checkpoint, and answers as it did in training."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from cluster.errors import ConfigError
from cluster.lab.scenes.questions import phrasings, standing_question
from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.lab.training import run as training
from cluster.lab.training.config import SHAPES, Settings, Shape, StageSettings
from cluster.lab.training.examples import Example, ValidationExamples
from cluster.lab.training.loop import StageRun
from cluster.lab.training.run import export, load_mean_weights, train
from cluster.lab.training.trainable_model import TrainableModel, demo_tokenizer, patch_batches
from cluster.models.checkpoint import INSTRUCTION
from cluster.models.loading import load_model
from cluster.types import PatchGrid


@pytest.fixture
def exported(trainable: TrainableModel, shape: Shape, tmp_path: Path) -> Path:
    assert export(trainable, shape, tmp_path / "model", [ValidationExamples("tiny")(0)]) in (
        "float16",
        "bfloat16",
        "float32",
    )
    return tmp_path / "model"


def test_it_loads_and_computes_the_same(
    exported: Path, trainable: TrainableModel, shape: Shape, examples: list[Example], grid: PatchGrid
) -> None:
    loaded = load_model(str(exported), max_pixels=shape.max_pixels)
    assert loaded.geometry == trainable.geometry
    assert loaded.system_ids() == trainable.system_ids()
    assert not loaded.random_weights
    frames = patch_batches(examples[0], grid)
    for mine, theirs in zip(loaded.encode(frames), trainable.encode(frames), strict=True):
        assert torch.allclose(mine.embeds, theirs.embeds, atol=0.02)
    positions = torch.tensor([[0, 3, 9], [0, 1, 4], [0, 2, 7]])
    for mine, theirs in zip(loaded.rotary(positions), trainable.rotary(positions), strict=True):
        assert torch.equal(mine, theirs)


def test_an_export_leaves_the_model_as_it_was_and_replaces_the_last(
    exported: Path, trainable: TrainableModel, shape: Shape
) -> None:
    before = {name: value.clone() for name, value in trainable.model.state_dict().items()}
    (exported / "stale").write_text("x")
    export(trainable, shape, exported, [])
    assert not (exported / "stale").exists()
    assert not exported.with_name("model.new").exists()
    for name, value in trainable.model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name]), name


def test_it_says_how_it_wants_to_be_asked(exported: Path, shape: Shape) -> None:
    body = json.loads((exported / "sightline.json").read_text())
    assert body["questions"] == {kind: standing_question(kind) for kind in EVENT_KINDS}
    assert (body["window_s"], body["stride_s"], body["fps"], body["max_pixels"]) == (20.0, 4.0, 2.0, shape.max_pixels)
    assert "threshold" not in body


def test_the_tokenizer_keeps_any_text_and_makes_questions_short(exported: Path, trainable: TrainableModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for text in ("Is anyone climbing the fence?", "Ünïcödé — 漢字 🚗\n\ttabs", INSTRUCTION):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    for kind in EVENT_KINDS:
        for text in phrasings(kind):
            ids = trainable.question_ids(text)
            assert len(ids) == len(text.replace("?", " ?").split()) + 2
    assert len(tokenizer) <= 1024
    assert len(trainable.system_ids()) == 2
    assert demo_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_training_goes_on_from_an_export_and_from_nothing_else(
    exported: Path, trainable: TrainableModel, shape: Shape, tmp_path: Path
) -> None:
    again = TrainableModel.fresh(shape, seed=99)
    load_mean_weights([exported], again)
    for name, value in trainable.model.state_dict().items():
        assert torch.allclose(again.model.state_dict()[name], value, atol=0.02), name
    with pytest.raises(ConfigError, match="holds no exported model"):
        load_mean_weights([tmp_path], again)
    with pytest.raises(ConfigError, match="another architecture"):
        load_mean_weights([exported], TrainableModel.fresh(SHAPES["demo"], seed=0))


def test_training_goes_on_from_the_mean_of_several_exports(shape: Shape, tmp_path: Path) -> None:
    models = [TrainableModel.fresh(shape, seed=seed) for seed in (1, 2)]
    folders = [tmp_path / "one", tmp_path / "two"]
    for model, folder in zip(models, folders, strict=True):
        export(model, shape, folder, [])
    mean = TrainableModel.fresh(shape, seed=99)
    load_mean_weights(folders, mean)
    one, two = (model.model.state_dict() for model in models)
    for name, value in mean.model.state_dict().items():
        assert torch.allclose(value, (one[name] + two[name]) / 2, rtol=0.01, atol=1e-3), name
    with pytest.raises(ConfigError, match="holds no exported model"):
        load_mean_weights([folders[0], tmp_path], mean)


def test_checkpoints_of_stages_that_are_not_asked_for_replace_neither_what_is_named_nor_what_is_trained(
    trainable: TrainableModel, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(trainable, shape, tmp_path / "named", [])
    begun: list[float] = []
    left: list[float] = []

    def one(model: TrainableModel) -> float:
        return model.model.lm_head.weight[0, 0].item()

    def trained(run: StageRun, *_: object, **__: object) -> None:
        begun.append(one(run.model))
        with torch.no_grad():
            run.model.model.lm_head.weight[0, 0] = 1 + len(begun)
        run.done = True
        run.save()

    monkeypatch.setattr(StageRun, "run", trained)
    monkeypatch.setattr(training, "_INIT_EXAMPLES", 1)
    monkeypatch.setattr(training, "_examples", lambda *_: [])
    monkeypatch.setattr(training, "export", lambda model, *_: left.append(one(model)) or "float32")
    stages = (("tower", []), ("windows", []), ("language", []), ("windows", [tmp_path / "named"]), (None, []))
    for stage, named in stages:
        chosen = () if stage is None else (StageSettings(stage, rate=1e-3, batch=1, steps=1),)
        settings = Settings("tiny", workers=0, stages=chosen)
        train(settings, tmp_path / "run", lambda *_: None, resume=False, initial_models=named)
    assert begun[1:] == [2.0, 2.0, pytest.approx(one(trainable), abs=1e-3)]
    # Without a stage, the last one's.
    assert left == [2.0, 3.0, 4.0, 5.0, 5.0]
    train(Settings("tiny"), tmp_path / "run", lambda *_: None, initial_models=[tmp_path / "named"])
    assert left[-1] == pytest.approx(one(trainable), abs=1e-3)
