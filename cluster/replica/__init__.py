"""A replica process: frame intake, window queue, engine steps, free questions."""
