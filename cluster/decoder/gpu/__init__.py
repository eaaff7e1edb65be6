"""The decoder's work on sampled pictures as batched torch operations, for decoders on a GPU (`cpu` runs the same)."""
