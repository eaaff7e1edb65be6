"""Windows as every engine has them: streams, plans, refresh policies, scores, export."""
