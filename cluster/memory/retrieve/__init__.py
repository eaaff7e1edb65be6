"""Retrievers: which clusters a question needs."""
