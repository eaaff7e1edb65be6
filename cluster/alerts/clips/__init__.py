"""Snapshots and clips of incidents: fetched from decoders, kept on disk under a budget."""
