"""Reports: charts, pages and numbers as all of them write them; and the demo's, a typed model with its page."""
