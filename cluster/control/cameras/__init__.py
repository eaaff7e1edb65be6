"""Declared cameras: their table, their managers, and the changes between two declarations."""
