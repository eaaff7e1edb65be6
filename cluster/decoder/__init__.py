"""A decoder process: each camera's pipeline, decode turns, frames to its replica, newest packets for clips."""
