"""Pruners, one per file: select the patches of a frame to encode."""
