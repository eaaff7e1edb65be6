"""Frames to answers: one protocol (``base``), what all engines share (``window``), and the engines."""
