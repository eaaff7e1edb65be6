"""Refresh policies: which tokens of the overlap are computed again."""
