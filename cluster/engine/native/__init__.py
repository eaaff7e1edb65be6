"""The native engine: selective KV reuse over transformers checkpoints (CodecSight section 3.4).

A window's way, module by module (``window/`` is what all engines share):

1. ``window/stream`` holds frames and closes windows (``windows``); ``windowed`` steps a batch of them, and repeats the
   last answers where nothing moved.
2. ``window/encode`` runs pending frames of all streams through the tower in one call.
3. ``plan`` lays the window out (``planner``), asks the ``refresh`` policy what to recompute, and finds slots in ``kv``,
   where keys lie raw, so that they may move.
4. ``forward`` runs the plans of all streams as one ragged pass, with ``attention`` and the ``kernels`` inside it.
5. ``score`` reads the answers off the logits; ``decode`` spells explanations out.
"""

from __future__ import annotations

from cluster.engine.native.engine import NativeEngine as NativeEngine
