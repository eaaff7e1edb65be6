"""Tiers, one per file: where remembered KV lies."""
