"""An evaluation of memory as figures and rows, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult
from cluster.lab.evaluation.datasets.video import Skipped
from cluster.lab.evaluation.memory.results import MemorySetting, SettingResult
from cluster.lab.evaluation.metrics import Measured
from cluster.lab.evaluation.report import finite


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """``results``: one for each setting. ``baseline``: the one that the others' drops are measured against, None for
    none. ``facts``: what was evaluated, on what. ``skipped``: what the data set left out."""

    title: str
    results: tuple[SettingResult, ...]
    baseline: SettingResult | None
    drops: dict[MemorySetting, dict[str, Measured]]
    facts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """``all``, then every kind of question that any setting was asked."""
        return tuple(dict.fromkeys(kind for result in self.results for kind in result.accuracy))

    @property
    def figures(self) -> dict[str, float]:
        """Accuracy and drop of each setting by name, where they are defined."""
        found = {f"accuracy {each.setting.name}": each.accuracy["all"].value for each in self.results}
        found |= {f"drop {setting.name}": drop["all"].value for setting, drop in self.drops.items()}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def to_json(self) -> str:
        """The same object as every bench writes, and coverage, drops and what was skipped beside it."""
        notes = [*(f"{name}: {value}" for name, value in self.facts.items()), *self.notes]
        rows = [self._row(result) for result in self.results]
        body: dict[str, Any] = json.loads(BenchResult("memory", self.figures, rows, notes).to_json())
        body["baseline"] = None if self.baseline is None else self.baseline.setting.name
        body["coverage"] = {
            each.setting.name: {space: asdict(coverage) for space, coverage in each.coverage.items()}
            for each in self.results
        }
        body["questions"] = {
            each.setting.name: [asdict(question) for question in each.answered] for each in self.results
        }
        body["skipped"] = [{"path": str(each.path), "reason": each.reason} for each in self.skipped]
        return json.dumps(finite(body), indent=2, allow_nan=False)

    def _row(self, result: SettingResult) -> dict[str, Any]:
        row = result.row()
        for kind, measured in self.drops.get(result.setting, {}).items():
            row[f"drop_{kind}"] = measured.value
            row[f"drop_{kind}_low"], row[f"drop_{kind}_high"] = measured.interval
        return row


def memory_report(
    title: str,
    results: Sequence[SettingResult],
    *,
    baseline: MemorySetting | None = None,
    facts: dict[str, str] | None = None,
    notes: Sequence[str] = (),
    skipped: Sequence[Skipped] = (),
) -> MemoryReport:
    """Measure everything there is to measure.

    Args:
        title: of the report.
        results: one for each setting, at least one.
        baseline: the setting that the others are compared with; one of ``results``.
        facts: name -> value, printed first.
        notes: what a reader must know.
        skipped: what the data set left out.

    Raises:
        ConfigError: no result, two of one setting, a baseline that was not measured, or settings that were asked
            different questions.
    """
    by_setting = {result.setting: result for result in results}
    if not results or len(by_setting) < len(results):
        raise ConfigError(f"a report needs one result for each setting, not {len(results)} for {len(by_setting)}")
    if baseline is not None and baseline not in by_setting:
        raise ConfigError(f"the baseline {baseline.name} is not among the settings that were measured")
    full = by_setting[baseline] if baseline is not None else None
    drops = {} if full is None else {each.setting: each.drop_from(full) for each in results if each is not full}
    return MemoryReport(title, tuple(results), full, drops, dict(facts or {}), tuple(notes), tuple(skipped))
