"""Training of the demo model: a small Qwen2.5-VL that answers standing questions about synthetic CCTV scenes.

Frames come from the renderer (:mod:`examples`), pruned by the production pruners; sequences are laid out and masked
like the engine's windows (:mod:`sequence_layout`).
"""
