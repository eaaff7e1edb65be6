"""Training of the demo model: a small Qwen2.5-VL that answers standing questions about synthetic CCTV scenes.

Pictures come straight from the renderer (:mod:`examples`), pruned by the live system's own pruners, and a sequence is
laid out and masked as the engine would have computed it (:mod:`layout`), so that what is learnt is what is served.
"""
