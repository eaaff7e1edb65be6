"""Snapshots and clips of incidents: requested from decoders, stored on disk within a size limit."""
