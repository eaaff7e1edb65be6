"""The small window and the two questions that these tests share."""

from cluster.lab.evaluation.settings import WindowShape

SHAPE = WindowShape(window_s=6, stride_s=2, fps=2, anchor_interval_s=4)
QUESTIONS = {"person": "Is anyone there?", "car": "Is there a car?"}
