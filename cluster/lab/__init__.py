"""Benchmarks, synthetic scenes, training, evaluation and capacity planning; the library never imports it."""
