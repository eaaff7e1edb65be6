"""``sightline demo``: clips, cluster, cameras by pull and push, measurement, report."""
