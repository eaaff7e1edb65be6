"""``sightline models check``: verifies that a checkpoint is computed correctly on this machine."""
