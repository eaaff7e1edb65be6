"""What a command line says of a city, as the simulator takes it: pools, ladder, objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from cluster.control import costs
from cluster.control.ladder import Ladder, default
from cluster.errors import ConfigError
from loadtest.city.city import PoolPlan
from loadtest.city.result import Objective

MODEL = "qwen2.5-vl-7b"
NO_LADDER = "none"


def parse_pools(texts: Sequence[str], model: str = MODEL) -> tuple[tuple[PoolPlan, ...], bool]:
    """``KIND=N`` each, or one ``KIND`` alone; whether the numbers are known.

    A kind is an accelerator with a shipped cost model of ``model`` (h100), the name of a shipped one, or a file.

    Raises:
        ConfigError: no such cost model, no number, or several kinds without one.
    """
    found: list[PoolPlan] = []
    listed = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    counted = ["=" in text for text in listed]
    if not listed or (not all(counted) and len(listed) > 1):
        raise ConfigError(
            "--gpus takes KIND=N for each kind, as in h100=64, or one KIND alone to find its least number"
        )
    for text in listed:
        kind, _, number = text.partition("=")
        if number and (not number.isdecimal() or int(number) < 1):
            raise ConfigError(f"--gpus {text!r}: the number of replicas must be at least 1, as in {kind}=64")
        if "=" in text and not number:
            raise ConfigError(f"--gpus {text!r} has no number after the equals sign, as in {kind}=64")
        if any(pool.kind == kind for pool in found):
            raise ConfigError(f"--gpus names {kind!r} twice; add the numbers up")
        found.append(PoolPlan(kind, int(number or 1), _costs(kind, model)))
    return tuple(found), all(counted)


def _costs(kind: str, model: str) -> costs.CostModel:
    shipped = f"{model}-{kind}"
    if shipped in costs.names():
        return costs.load(shipped)
    if kind in costs.names() or Path(kind).suffix == ".json":
        return costs.load(kind)
    kinds = [name.removeprefix(f"{model}-") for name in costs.names() if name.startswith(f"{model}-")]
    raise ConfigError(
        f"there is no cost model of {model} on {kind!r}; there are: {', '.join(kinds) or 'none'}; name one of "
        f"{', '.join(costs.names())}, or a file that sightline bench cost --out wrote"
    )


def parse_ladder(text: str) -> tuple[Ladder | None, str]:
    """``default``, ``none``, or a file or model folder; the ladder and what to call it.

    Raises:
        ConfigError: there is no ladder there.
    """
    if text == NO_LADDER:
        return None, NO_LADDER
    if text == "default":
        return default(), text
    return Ladder.load(Path(text)), text


def parse_objective(text: str) -> Objective:
    """``on_time=0.99,answered=0.99,quality=0.98``, any of them left out.

    Raises:
        ConfigError: another name, or no share.
    """
    known = [each.name for each in fields(Objective)]
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if name not in known or not 0 <= share <= 1:
            raise ConfigError(
                f"--objective {part!r} is not NAME=SHARE with a share from 0 to 1; names are: {', '.join(known)}"
            )
        values[name] = share
    return Objective(**values)
