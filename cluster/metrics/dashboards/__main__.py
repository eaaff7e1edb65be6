"""Writes the dashboards as files that Grafana is provisioned with."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.metrics.dashboards import DASHBOARDS

FOLDER = Path("deploy/helm/sightline/dashboards")


def main() -> None:
    """``python -m cluster.metrics.dashboards [FOLDER]``; files of dashboards that are no more are removed."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    names = {f"{dashboard.uid}.json" for dashboard in DASHBOARDS}
    for stale in set(folder.glob("sightline-*.json")) - {folder / name for name in names}:
        stale.unlink()
    for dashboard in DASHBOARDS:
        (folder / f"{dashboard.uid}.json").write_text(dashboard.to_json())


if __name__ == "__main__":
    main()
