"""Sightline's library: independent of Ray; importing it opens nothing."""

__version__ = "0.1.0"
