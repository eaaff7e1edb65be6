"""A cluster's ``/metrics`` page as numbers, and what was counted between two looks at it."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Page = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""(sample's name, its labels in order) -> value."""


def fetch(address: str, timeout_s: float = 5.0) -> Page:
    """The page at ``host:port``; empty when nobody answers, which a fault may be the reason for."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as reply:
            return parse(reply.read().decode())
    except (urllib.error.URLError, OSError, ValueError):
        return {}


def parse(text: str) -> Page:
    """Raises ``ValueError`` for anything but Prometheus' text format."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def grown(before: Page, after: Page, name: str, label: str, where: Mapping[str, str] | None = None) -> Counter[str]:
    """By how much the counter ``name`` grew, summed by ``label``, of the samples with the labels ``where``.

    A process that began anew counts from 0: what it has counted since is what it shows.
    """
    total: Counter[str] = Counter()
    for (sample, labels), value in after.items():
        held = dict(labels)
        if sample != name or any(held.get(key) != wanted for key, wanted in (where or {}).items()):
            continue
        earlier = before.get((sample, labels), 0.0)
        growth = value - earlier if value >= earlier else value
        if growth:
            total[held.get(label, "")] += round(growth)
    return total


def level(page: Page, name: str, label: str) -> dict[str, float]:
    """The gauge ``name`` summed by ``label``."""
    total: dict[str, float] = {}
    for (sample, labels), value in page.items():
        if sample == name:
            key = dict(labels).get(label, "")
            total[key] = total.get(key, 0.0) + value
    return total
