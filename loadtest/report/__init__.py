"""The report of a load test: one self-contained page, JSON, and a summary of one screen."""
