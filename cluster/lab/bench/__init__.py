"""Benchmarks (``sightline bench NAME``), each of which runs production code."""
