"""Camera table, placement, admission, demand estimation and the quality ladder: plain state, no processes."""
