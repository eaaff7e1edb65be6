"""Steps, resuming, and what is left when a run is interrupted."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError
from cluster.lab.training import loop
from cluster.lab.training.config import Settings, Shape, StageSettings
from cluster.lab.training.examples import Example, ValidationExamples
from cluster.lab.training.loop import StageRun, schedule
from cluster.lab.training.loss import DenseHeads
from cluster.lab.training.run import make_stage
from cluster.lab.training.trainable_model import TrainableModel

SETTINGS = Settings(shape="tiny", seed=5, workers=0, validation_scenes=2)


class Quiet:
    def __init__(self) -> None:
        self.shares: list[float] = []
        self.metrics: list[str] = []

    def __call__(self, text: str, share: float | None) -> None:
        if share is not None:
            self.shares.append(share)
        elif text.startswith("validation: "):
            self.metrics.append(text)


@functools.cache
def example(name: str, number: int) -> Example:
    """Each is drawn once for all tests."""
    return make_stage(SETTINGS, StageSettings(name, rate=3e-3, batch=2, steps=6)).make(number)


@pytest.fixture
def make_run(shape: Shape, tmp_path: Path) -> Callable[..., StageRun]:
    def make(name: str = "windows", folder: str = "run", seed: int = 3, **stage: object) -> StageRun:
        settings = StageSettings(name, rate=3e-3, batch=2, **{"steps": 6, **stage})
        torch.manual_seed(seed)
        model = TrainableModel.fresh(shape, seed=seed)
        model.compute = torch.float32
        heads = DenseHeads(model.text_config.hidden_size)
        made = replace(make_stage(SETTINGS, settings), make=functools.partial(example, name))
        return StageRun(SETTINGS, made, model, heads, tmp_path / folder)

    return make


@pytest.mark.parametrize(("name", "optimizer"), [("tower", "adamw"), ("windows", "muon")])
def test_loss_falls_on_a_fixed_batch(make_run, name: str, optimizer: str) -> None:
    run = make_run(name, steps=30, warm_up=0.1, optimizer=optimizer)
    batch = [run.stage.make(number) for number in (0, 4)]
    losses = [run.train_step(batch)["loss"] for _ in range(14)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_frozen_tower_stays_as_it_is(make_run) -> None:
    run = make_run(train_tower=False)
    before = {name: value.clone() for name, value in run.model.model.state_dict().items()}
    run.train_step([run.stage.make(0)])
    changed = {name for name, value in run.model.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert not any("visual" in name for name in changed)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_takes_the_steps_it_would_have_taken(make_run, optimizer: str) -> None:
    whole = make_run("tower", folder="whole", optimizer=optimizer)
    quiet = Quiet()
    whole.run(quiet, validation=list)

    first = make_run("tower", folder="parts", optimizer=optimizer)
    with pytest.raises(KeyboardInterrupt):
        _interrupt_after(first, 3)
    assert first.path.is_file()
    # Another seed: everything must come from the checkpoint.
    second = make_run("tower", folder="parts", seed=99, optimizer=optimizer)
    assert second.resume()
    assert second.step == 3
    second.run(quiet, validation=list)
    assert second.step == whole.step == 6
    for name, value in whole.model.model.state_dict().items():
        assert torch.equal(value, second.model.model.state_dict()[name]), name


def _interrupt_after(run: StageRun, steps: int) -> None:
    step = run.train_step

    def interrupted(examples: list[Example]) -> dict[str, float]:
        if run.step == steps:
            raise KeyboardInterrupt
        return step(examples)

    run.train_step = interrupted  # type: ignore[method-assign]
    run.run(Quiet(), validation=list)


def test_a_stage_that_is_done_is_not_trained_again(make_run) -> None:
    run = make_run("tower", steps=2)
    run.run(Quiet(), validation=list)
    again = make_run("tower", steps=2, seed=8)
    assert again.resume()
    assert again.done
    for name, value in run.model.model.state_dict().items():
        assert torch.equal(value, again.model.model.state_dict()[name]), name


def test_the_better_of_weights_and_average_is_kept(make_run) -> None:
    run = make_run("tower", steps=2)
    seen: list[dict[str, torch.Tensor]] = []

    def judge(model: TrainableModel, heads: DenseHeads, examples: list[Example]) -> dict[str, float]:
        seen.append({name: value.clone() for name, value in model.model.state_dict().items()})
        # The weights as they are come first, and are better.
        return {"auc": 0.9 if len(seen) == 1 else 0.8}

    run.stage = replace(run.stage, judge=judge)
    run.run(Quiet(), validation=lambda: [ValidationExamples("tiny")(0)])
    assert len(seen) == 2
    name = next(name for name in seen[0] if not torch.equal(seen[0][name], seen[1][name]))
    assert torch.equal(run.model.model.state_dict()[name], seen[0][name])


def test_a_stage_that_is_interrupted_while_it_is_judged_at_its_end_is_judged_again(make_run) -> None:
    run = make_run("tower", steps=2)

    def interrupted(model: TrainableModel, heads: DenseHeads, examples: list[Example]) -> dict[str, float]:
        raise KeyboardInterrupt

    run.stage = replace(run.stage, judge=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run(Quiet(), validation=lambda: [ValidationExamples("tiny")(0)])
    again = make_run("tower", steps=2, seed=8)
    assert again.resume()
    assert (again.step, again.done) == (2, False)


def test_a_batch_that_breaks_arithmetic_is_skipped(make_run) -> None:
    run = make_run("tower")
    loss = run.stage.loss
    before = {name: value.clone() for name, value in run.model.model.state_dict().items()}

    def broken(model: TrainableModel, heads: DenseHeads, examples: list[Example]):
        good = loss(model, heads, examples)
        return replace(good, total=good.total * float("nan"))

    run.stage = replace(run.stage, loss=broken)
    assert run.train_step([run.stage.make(0)]) == {"skipped": 1.0}
    assert run.step == 1
    for name, value in run.model.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_log_has_losses_and_metrics(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOG_STEPS", 2)
    run = make_run("windows", steps=2)
    quiet = Quiet()
    run.run(quiet, validation=lambda: list(map(ValidationExamples("tiny"), range(2))))
    lines = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["losses", "validation_raw", "validation"]
    assert lines[0]["step"] == 2
    assert lines[0]["loss"] > 0
    assert {"auc", "f1", "video_f1", "auc:fall"} <= lines[1].keys()
    assert quiet.shares == [1.0]
    assert len(quiet.metrics) == 2


def test_without_validation_scenes_nothing_is_judged(make_run) -> None:
    run = make_run("tower", steps=2)
    run.settings = replace(run.settings, validate_minutes=0.0)
    quiet = Quiet()
    run.run(quiet, validation=list)
    assert run.done
    assert quiet.metrics == []


def test_minutes_bound_a_stage_too(make_run) -> None:
    run = make_run("tower", steps=None, minutes=0.005)
    run.run(Quiet(), validation=list)
    assert run.done
    assert run.elapsed_s >= 0.3


def test_another_runs_checkpoint_is_refused(make_run, tmp_path: Path) -> None:
    run = make_run("tower", steps=1)
    run.run(Quiet(), validation=list)
    other = make_run("tower", steps=1, folder="other")
    other.folder = run.folder
    other._identity["seed"] = 6
    with pytest.raises(ConfigError, match="seed 5, not 6"):
        other.resume()


def test_a_torn_checkpoint_is_an_error_that_names_it(make_run) -> None:
    run = make_run("tower", steps=1)
    run.folder.mkdir(parents=True)
    run.path.write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(ConfigError, match=r"cannot read the checkpoint .*tower\.pt"):
        run.resume()


def test_the_schedule_warms_up_and_comes_down() -> None:
    assert schedule(0.0, 0.1) < 0.05
    assert schedule(0.05, 0.1) == pytest.approx(0.5)
    assert schedule(0.1, 0.1) == pytest.approx(1.0)
    assert schedule(0.55, 0.1) == pytest.approx(0.51)
    assert schedule(1.0, 0.1) == pytest.approx(0.02)
