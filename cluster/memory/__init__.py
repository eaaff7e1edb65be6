"""KV that outlives the window: what a camera remembers, under a hard cap. Knows no engine and no model."""
