"""Capacity planning: predicted latency and energy of streaming video models on accelerators, from first principles."""
