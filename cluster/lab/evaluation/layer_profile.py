"""VLCache's layer profile: the share of a window's overlap that each layer recomputes, fitted on validation videos.

For every depth ``d``, whole frames are refreshed in the layers below ``d`` and reused above. ``e_d`` is the answers'
error against full computation, and ``e_d − e_{d+1}`` the gain of refreshing layer ``d``. Layers get shares proportional
to their gain, but never more than a layer below: tokens that a layer skips stay skipped above it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cluster.errors import ModelError
from cluster.lab.evaluation.calibration import isotonic, logit
from cluster.lab.evaluation.datasets import LabelledVideo
from cluster.lab.evaluation.metrics import Floats
from cluster.lab.evaluation.run import evaluate
from cluster.lab.evaluation.settings import Setting, WindowShape, full_computation
from cluster.lab.evaluation.work import OnProgress
from cluster.models.base import VisionLanguageModel

# Difference of logits due to another order of computation.
_NOISE = 1e-5


def measure_errors(
    model: VisionLanguageModel,
    videos: Sequence[LabelledVideo],
    questions: Mapping[str, str],
    shape: WindowShape,
    *,
    work: Path | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> Floats:
    """``e_d`` for depths ``0..L``: root mean square error of the answers in logits. See
    :func:`cluster.lab.evaluation.run.evaluate` for arguments, errors and skipped videos."""
    layers = len(model.layers)
    steps = []
    for depth in range(layers + 1):
        shares = tuple(float(layer < depth) for layer in range(layers))
        steps.append(Setting(f"depth {depth}", "none", "first_percent", depth / layers, shape=shape, profile=shares))
    exact = full_computation(shape)
    found = evaluate(videos, model, [exact, *steps], questions, consecutive=1, work=work, on_progress=on_progress)

    def logits(setting: Setting) -> Floats:
        return logit(np.array([s for v in found.videos for w in found.run(v, setting).windows for s in w.scores]))

    wanted = logits(exact)
    errors: Floats = np.array([np.sqrt(((logits(step) - wanted) ** 2).mean()) for step in steps])
    return errors


def layer_profile(errors: Floats) -> tuple[float, ...]:
    """Share per layer, relative to the mean: the gains, fitted by the nearest non-increasing sequence. Raises
    ``ModelError``: refreshing gains nothing."""
    brought = np.maximum(errors[:-1] - errors[1:], 0.0)
    if brought.max() < _NOISE:
        raise ModelError("reusing everything gives the answers of full computation; there is nothing to measure")
    shares = -isotonic(-brought, np.ones(len(brought)))
    return tuple(float(share) for share in shares / shares.mean())
