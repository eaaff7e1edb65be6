"""Footage for people: a camera's newest picture, and snapshots and clips of incidents."""
