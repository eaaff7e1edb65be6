"""Window code shared by all engines: streams, layout, refresh policies, scores, export."""
