"""Samples of several processes under one name, each with the process that it is of."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


def merge_families(merged: dict[str, Metric], process: str, families: Iterable[Metric]) -> None:
    """Add a process's families to those of others, by name, with a label ``process``."""
    for family in families:
        target = merged.get(family.name)
        if target is None:
            target = merged[family.name] = Metric(family.name, family.documentation, family.type)
        target.samples += [
            Sample(sample.name, {**sample.labels, "process": process}, sample.value) for sample in family.samples
        ]


class LabelledCollector(Collector):
    """A registry's metrics with a label ``process``, as the gateway shows them."""

    def __init__(self, registry: CollectorRegistry, process: Callable[[], str]) -> None:
        self._registry, self._process = registry, process

    def describe(self) -> list[Metric]:
        """Keeps registration from collecting."""
        return []

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        merge_families(merged, self._process(), self._registry.collect())
        yield from merged.values()
