"""Synthetic CCTV with ground truth: scenes are scripted (``scene.py``), rendered at any size (``render.py``) and
encoded as a camera would (``encode.py``); windows and questions get their truth from the script."""
