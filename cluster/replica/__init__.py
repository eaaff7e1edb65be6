"""A replica process: frames in, the window queue, steps of the engine, free questions."""
