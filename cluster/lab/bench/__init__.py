"""Benches: ``sightline bench NAME``; each runs what production runs."""
