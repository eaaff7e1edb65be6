"""Footage for people: newest pictures, live views, and snapshots and clips of incidents."""
