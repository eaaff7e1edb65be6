"""Refresh policies: which reused tokens of the overlap are recomputed."""
