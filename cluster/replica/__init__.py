"""A replica process: frame intake, the window queue, engine steps, free questions."""
