"""Inference engines: interface and shared code (``base``, ``window``), and the implementations."""
