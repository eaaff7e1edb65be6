"""Label values that Sightline's processes can emit, where a label's values are a closed list, and names of others."""

import json
import re
import subprocess
import sys
from collections import defaultdict

CLOSED = ("direction", "event", "kind", "level", "method", "outcome", "reason", "result", "since", "state")
"""Labels that code alone fills; the others name cameras, processes, questions and the like."""

_PRINT = """
import json
from typing import get_args
from cluster import metrics
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.metrics import NodeTierCollector
from cluster.memory.tiers.stack import TierStack
from cluster.metrics.zero_series import Role, create_zero_series
from cluster.replica.memory import MemoryCollector

for role in get_args(Role):
    create_zero_series(role, ["sink"])
camera = metrics.CameraMetrics("camera")
metrics.WatchMetrics()
collectors = MemoryCollector(TierStack([Arena(8 << 20)])), NodeTierCollector(1, lambda: None)
families = [*metrics.REGISTRY.collect(), *(family for each in collectors for family in each.collect())]
print(json.dumps([(sample.name, sample.labels) for family in families for sample in family.samples]))
"""


def emitted() -> dict[tuple[str, str], set[str]]:
    """Values by series and label, of processes that have just started: a process of its own, which counted nothing."""
    printed = subprocess.run([sys.executable, "-c", _PRINT], capture_output=True, text=True, check=True).stdout
    values = defaultdict(set)
    for series, labels in json.loads(printed):
        for label, value in labels.items():
            values[series, label].add(value)
    return values


def unknown_values(text: str, known: dict[tuple[str, str], set[str]]) -> set[tuple[str, str, str]]:
    """Series, label and value of every selector in ``text`` that no process can emit."""
    found = set()
    for series, selector in re.findall(r"\b(sightline_\w+)\{([^}]*)\}", text.replace('\\"', '"')):
        if series.startswith("sightline_gpu_"):
            # Only where there is a GPU.
            continue
        for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
            if label in CLOSED and "$" not in value:
                single = value.split("|") if "~" in operator else [value]
                found |= {(series, label, each) for each in single if each not in known[series, label]}
    return found
