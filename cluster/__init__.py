"""Sightline's library: no Ray, nothing opened on import."""

__version__ = "0.1.0"
