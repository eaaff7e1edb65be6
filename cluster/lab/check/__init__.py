"""Is this checkpoint computed right on this machine? ``sightline models check``."""
