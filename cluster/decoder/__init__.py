"""A decoder process: camera pipelines, the decode gate, frames to replicas, packet rings for clips."""
