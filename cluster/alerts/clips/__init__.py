"""Snapshots and clips of incidents: requested from decoders, stored on disk under a budget."""
