"""Refresh policies: select the overlap tokens to recompute."""
