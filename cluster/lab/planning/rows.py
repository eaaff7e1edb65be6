"""One line of a plan: a machine, a method, a cache length, and what a frame and a generated token cost there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.lab.planning.accelerator import Prediction, predict
from cluster.lab.planning.figures import MEASURED, PAPER_MODEL
from cluster.lab.planning.methods import Method, methods
from cluster.lab.planning.platforms import Platform
from cluster.lab.planning.workload import ModelShape, frame, token


@dataclass(frozen=True, slots=True)
class Row:
    """A frame and a generated token on one machine by one method at one cache length."""

    platform: Platform
    method: Method
    cache: int
    frame: Prediction
    token: Prediction

    model: ModelShape

    @property
    def extrapolated(self) -> bool:
        """The paper did not run this method on this machine, or not this model."""
        return (self.platform.name, self.method.name) not in MEASURED or self.model.name != PAPER_MODEL

    def as_json(self) -> dict[str, Any]:
        """Seconds, joules and bytes under the names that ``Prediction`` has."""
        return {
            "platform": self.platform.name,
            "method": self.method.name,
            "cache": self.cache,
            "batch": self.frame.batch,
            "extrapolated": self.extrapolated,
            "source": self.platform.source,
            "frame": asdict(self.frame),
            "token": asdict(self.token),
        }


def usual_methods(platform: Platform) -> list[Method]:
    """What the paper runs on such a machine: software methods on GPUs, ReSV with its engine on V-Rex."""
    names = ["resv-dre"] if platform.cores else ["flexgen", "infinigen", "infinigenp", "rekv", "resv"]
    return [methods.get(name) for name in names]


def rows(
    platforms: Sequence[Platform],
    chosen: Sequence[Method],
    model: ModelShape,
    caches: Sequence[int],
    batch: int,
    frame_tokens: int | None,
) -> list[Row]:
    """Predictions for every machine, method and cache length. ``chosen``: empty for each machine's usual methods.

    Raises:
        ConfigError: a length or the batch is below one.
    """
    return [
        Row(
            platform,
            method,
            cache,
            predict(platform, method, frame(model, cache, batch, frame_tokens)),
            predict(platform, method, token(model, cache, batch)),
            model,
        )
        for cache in caches
        for platform in platforms
        for method in chosen or usual_methods(platform)
    ]
