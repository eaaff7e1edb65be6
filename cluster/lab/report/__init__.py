"""Charts, pages and number formats shared by all reports, and the demo's report: typed records and their page."""
