"""Inference engines: the ``Engine`` protocol (``base``), shared window code (``window``), and implementations."""
