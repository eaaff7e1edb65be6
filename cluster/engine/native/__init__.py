"""Native engine: selective KV reuse over transformers checkpoints (CodecSight section 3.4).

Data flow of a window, by module (``window/`` is shared by all engines):

1. ``window/stream`` holds frames and closes windows (``windows``); ``base`` steps a batch of windows and repeats the
   last answers where nothing moved.
2. ``window/encode`` runs the pending frames of all streams through the vision tower in one call.
3. ``plan`` lays the window out (``planner``), has the ``refresh`` policy select the tokens to recompute, and allocates
   slots in ``kv``, where keys are rotated once, in the stream's own time.
4. ``forward`` runs the plans of all streams as one ragged pass, on one of the ``kernels``.
5. ``score`` computes scores from the logits; ``explanations`` decodes explanations.
"""

from cluster.engine.native.engine import NativeEngine as NativeEngine
