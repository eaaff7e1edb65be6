"""Pruners, one per file: which patches of a frame are worth encoding."""
