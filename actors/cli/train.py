"""``sightline train``: train the demo model, in resumable stages."""

from pathlib import Path
from typing import Annotated

import typer

from actors.cli.output import Progress
from cluster.errors import ConfigError
from cluster.files import check_writable

app = typer.Typer(help="Train the demo's model.", no_args_is_help=True)

# Minutes per stage and examples per step, on two CPU cores and on a GPU.
_CPU = {"tower": (32.0, 2), "language": (43.0, 1), "windows": (25.0, 1)}
_CUDA = {"tower": (4.0, 48), "language": (6.0, 24), "windows": (9.0, 24)}
_RATES = {"tower": 8e-4, "language": 8e-4, "windows": 4e-4}
# How often an example is reused where making one takes about as long as two training steps.
_REPLAYS = {"language": 1}


@app.callback()
def _training() -> None:
    """Without a callback, typer drops the name of a single command."""


@app.command("demo-model")
def demo_model(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for checkpoints, log and model.")],
    stage: Annotated[
        list[str] | None,
        typer.Option(help="Only these: tower, language, windows, export; may be repeated. Default: all."),
    ] = None,
    minutes: Annotated[
        list[str] | None, typer.Option(metavar="STAGE=N", help="Minutes to train a stage; may be repeated.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps per stage, instead of minutes.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples per step.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.0, help="Peak learning rate of each stage.")] = None,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    begin_with: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Start from an exported model, such as DIR/model; if repeated, from the mean of their weights.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the model.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Processes that render scenes.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of weights and scenes.")] = 0,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Resume from the checkpoints in DIR.")] = True,
    preset: Annotated[str, typer.Option(help="Size: demo or tiny.")] = "demo",
    validation_scenes: Annotated[int, typer.Option(min=0, help="Scenes to validate on; 0: none.")] = 48,
) -> None:
    """Train the demo model on synthetic scenes, then export it to DIR/model.

    Ctrl-C keeps the progress; the same command resumes it. DIR/log.jsonl has losses and validation metrics.

    $ sightline train demo-model --out out/train --minutes tower=30 --minutes windows=45
    """
    from cluster.lab.training.config import Settings, StageSettings
    from cluster.lab.training.run import EXPORT, TRAINING_STAGES, train

    defaults = _CUDA if device.startswith("cuda") else _CPU
    times = _minutes(minutes, {name: each for name, (each, _) in defaults.items()})
    known = (*TRAINING_STAGES, EXPORT)
    chosen = stage or known
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"unknown stage {unknown[0]!r}; there are: {', '.join(known)}")
    settings = Settings(
        shape=preset,
        seed=seed,
        device=device,
        threads=threads,
        workers=workers,
        validation_scenes=validation_scenes,
        stages=tuple(
            StageSettings(
                name=name,
                rate=_RATES[name] if rate is None else rate,
                batch=batch or defaults[name][1],
                steps=steps,
                minutes=None if steps else times[name],
                train_tower=name != "language",
                replays=_REPLAYS.get(name, 0),
                optimizer=optimizer,
            )
            for name in TRAINING_STAGES
            if name in chosen
        ),
    )
    check_writable(out)
    with Progress(total=1.0) as screen:
        train(
            settings,
            out,
            lambda text, share: screen.say(text) if share is None else screen.show(text, share),
            resume=resume,
            export_model=EXPORT in chosen,
            initial_models=begin_with or (),
        )


def _minutes(given: list[str] | None, defaults: dict[str, float]) -> dict[str, float]:
    """``STAGE=N`` options over the defaults. Raises ``ConfigError``: no such stage, or N is not a positive number."""
    times = dict(defaults)
    for option in given or []:
        name, _, number = option.partition("=")
        try:
            times[name] = float(number)
        except ValueError:
            raise ConfigError(f"--minutes {option!r} is not STAGE=N, as in --minutes windows=45") from None
        if name not in defaults or not times[name] > 0:
            raise ConfigError(f"--minutes {option!r}: name one of {', '.join(defaults)} and a positive number")
    return times
