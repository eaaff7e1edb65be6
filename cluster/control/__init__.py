"""Camera table, placement, admission, demand estimation and the quality ladder. Plain state, no processes."""
