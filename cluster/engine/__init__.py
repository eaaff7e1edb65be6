"""Inference engines: what all share (``base``, ``window``), and implementations."""
