"""Window code shared by all engines: streams, layouts, refresh policies, scores, export."""
