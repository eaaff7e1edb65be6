"""Storage tiers of memory KV, one per file."""
