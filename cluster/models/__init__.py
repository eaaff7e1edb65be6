"""Vision-language models: one file per family; checkpoints and layers come from transformers.

``load_model("tiny-qwen2_5_vl")`` gives a random-weight preset, ``load_model("/path/or/hub-id")`` a checkpoint.

Adding a family, in six steps:

1. Write ``<family>.py`` with one subclass of :class:`~cluster.models.base.VisionLanguageModel`, and file it in
   ``cluster.registry`` under the ``model_type`` of the checkpoint's ``config.json``.
2. Vision: ``_encode_kept`` packs the kept patches of many frames through the tower. Whatever depends on a patch's place
   (rotary, position embedding, window) is computed from its cell, never from its index among the kept.
3. Prompt: ``chat_system``, ``chat_user``, ``chat_answer``, ``chat_follow_up`` and ``video_brackets`` cut the family's
   chat template at the first and the last frame; ``_frame_text`` is what it writes around each.
4. Positions: ``frame_place``, ``next_position``, ``token_positions`` give each kept token its place in the full
   layout, and a rule in ``cluster.lab.bench.faults.positions`` writes the same out by hand.
5. The oracle: ``reference_logits`` calls the family's own transformers forward, nothing of ours in between.
6. Add a ``tiny-`` and a ``bench-`` preset to ``presets`` and ``catalog``: the shared matrix runs every oracle on the
   first, ``sightline bench families`` measures both.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.models.loading import load_model as load_model

__all__ = ["load_model"]


def __getattr__(name: str) -> Any:
    # torch and transformers cost seconds to import; the CLI's --help and the decoders never need them.
    if name == "load_model":
        from cluster.models.loading import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
