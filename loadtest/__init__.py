"""Load tests of a running cluster, and a simulated city on a fixed pool of accelerators."""
