"""Pruners: select the patches of a frame to encode."""
