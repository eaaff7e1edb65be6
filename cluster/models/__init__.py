"""Vision-language models: one file per family; checkpoints and layers come from transformers.

``loading.load_model("tiny-qwen2_5_vl")`` gives a random-weight preset, ``load_model("/path/or/hub-id")`` a checkpoint.

Adding a family, in six steps:

1. Write ``<family>.py`` with one subclass of :class:`~cluster.models.base.VisionLanguageModel`, and register it in
   ``cluster.registry`` under the ``model_type`` of the checkpoint's ``config.json``.
2. Vision: ``_encode_kept`` packs the kept patches of many frames through the tower. Everything that depends on a
   patch's position (rotary, position embedding, window) follows from its cell, never from its index among kept patches.
3. Prompt: ``chat_system``, ``chat_user``, ``chat_answer``, ``chat_follow_up`` and ``video_brackets`` split the family's
   chat template at the first and the last frame; ``_frame_text`` returns the text around each frame.
4. Positions: ``frame_place``, ``next_position``, ``token_positions`` give each kept token its position in the unpruned
   layout; write the same rule out by hand in ``cluster.lab.bench.faults.positions``.
5. Oracle: ``reference_logits`` calls the family's own transformers forward pass, with none of our code in between.
6. Add a ``tiny-`` and a ``bench-`` preset to ``presets``: the shared test matrix runs every oracle on the first,
   ``sightline bench families`` measures both.
"""
