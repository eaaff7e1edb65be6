"""Who has which camera, at what quality: table, placement, admission, demand, ladder. Plain state, no processes."""
