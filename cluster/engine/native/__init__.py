"""The native engine: selective KV reuse over transformers checkpoints (CodecSight section 3.4).

A window's way, module by module:

1. ``stream`` holds frames and closes windows (``windows``).
2. ``gate``: when nothing moved, the last answers stand and no model runs.
3. ``encode`` runs pending frames of all streams through the tower in one call.
4. ``plan`` lays the window out (``planner``), asks the ``refresh`` policy what to recompute, and finds room in ``kv``,
   where keys lie raw, so that they may move.
5. ``forward`` runs the plans of all streams as one ragged pass, with ``attention`` and the ``kernels`` inside it.
6. ``score`` reads the answers off the logits; ``decode`` spells explanations out.
7. ``export`` hands a stream to another engine.
"""

from __future__ import annotations

from cluster.engine.native.engine import NativeEngine as NativeEngine
from cluster.engine.window.windowed import StepStats as StepStats
from cluster.engine.window.windowed import WindowStats as WindowStats

__all__ = ["NativeEngine", "StepStats", "WindowStats"]
