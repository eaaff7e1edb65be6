"""Capacity planning: analytical latency and energy of streaming video models on accelerators; model cards."""
