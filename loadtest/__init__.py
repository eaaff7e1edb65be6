"""Load tests: fleets of simulated cameras against a real cluster, with faults, capacity search and reports."""
