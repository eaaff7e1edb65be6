"""Training of the demo model: a small Qwen2.5-VL that answers standing questions about synthetic CCTV scenes.

Frames come from the renderer (:mod:`examples`), pruned by the production pruners; a sequence is laid out and masked as
the engine computes it (:mod:`sequence_layout`).
"""
