"""Decoder process: camera pipelines, the decode gate, frame delivery to replicas, packet rings for clips."""
