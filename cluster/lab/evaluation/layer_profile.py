"""VLCache's profile: how much of a window's overlap each layer has to compute again, measured on validation videos.

For every depth ``d`` whole frames are refreshed in the layers below ``d`` and reused above. ``e_d`` is how far answers
are from those of full computation, and ``e_d − e_{d+1}`` what refreshing layer ``d`` brings. Layers get shares in
proportion to that, but no layer more than one before it: what a layer does not compute, none above it can.
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

# Of logits that were computed in another order.
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
    """``e_d`` for depths ``0..L``: root mean square of the answers' difference in logits. See
    :func:`cluster.lab.evaluation.run.evaluate` for arguments, errors, and videos that are passed over."""
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
    """Shares per layer over their mean: what each layer brings, as the nearest sequence that never rises. Raises
    ``ModelError``: refreshing brings nothing."""
    brought = np.maximum(errors[:-1] - errors[1:], 0.0)
    if brought.max() < _NOISE:
        raise ModelError("answers with everything reused are those of full computation: there is nothing to measure")
    shares = -isotonic(-brought, np.ones(len(brought)))
    return tuple(float(share) for share in shares / shares.mean())
