"""Storage tiers of remembered KV, one per file."""
