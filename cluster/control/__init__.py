"""Who has which camera, and at what quality: camera table, placement, admission, demand, ladder. Plain state, no processes."""
