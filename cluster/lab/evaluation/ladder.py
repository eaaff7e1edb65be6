"""Builds a quality ladder from the results of an accuracy evaluation."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.control.ladder import Ladder, Rung, default
from cluster.errors import ConfigError
from cluster.files import read_json
from cluster.lab.evaluation.settings import LADDER

# Rung -> row name of the same setting in other grids.
_ALIASES = {"full": "replenish + anchors"}


def read_accuracy_results(path: Path) -> dict[str, Any]:
    """Read the JSON of ``sightline eval accuracy --json``. Raises ``ConfigError``: missing, or not such a file."""
    try:
        body = read_json(path)
        if body["bench"] != "accuracy":
            raise ValueError(f"it is of {body['bench']!r}")
        rows = {str(row["setting"]): row for row in body["rows"]}
        return {"rows": rows, "notes": [str(note) for note in body["notes"]]}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not an evaluation result ({error!r}); make one with: "
            "sightline eval accuracy --settings ladder --json FILE"
        ) from None


def build_ladder(results: Mapping[str, Any]) -> Ladder:
    """Build the ladder from the output of :func:`read_accuracy_results`.

    F1 and kept tokens of a rung are relative to the ``full`` rung of the same run. A rung that measured better than the
    one above counts as equal: less computation is better only by chance. A rung without results drops by the same
    factor as in the default ladder; its ``source`` says so. Raises ``ConfigError``: full quality was not measured.
    """
    rows = results["rows"]
    whole = _row(rows, "full")
    if whole is None or not whole["f1"]:
        raise ConfigError(
            "the results lack full quality, or its F1 is 0; evaluate the ladder's rungs with: "
            "sightline eval accuracy --settings ladder --json FILE"
        )
    rungs = [Rung("full", source=f"measured: F1 {_f1(whole)}")]
    guesses = {each.name: each for each in default().rungs}
    measured = 1
    for above, rung in pairwise(LADDER):
        row = _row(rows, rung.name)
        if row is None:
            upper, guess = guesses[above.name], guesses[rung.name]
            f1, kept = rungs[-1].f1 * guess.f1 / upper.f1, rungs[-1].kept * guess.kept / upper.kept
            source = "derived: not measured, assumed to lose as much as in the default ladder"
        else:
            f1, kept = min(rungs[-1].f1, float(row["f1"]) / float(whole["f1"])), _share(row) / _share(whole)
            source = f"measured: F1 {_f1(row)} of {_f1(whole)}"
            measured += 1
        rungs.append(replace(rung, kept=round(kept, 4), f1=round(f1, 4), source=source))
    rungs.append(Rung("shed", shed=True, f1=0.0, source="no answer"))
    conditions = "; ".join(note for note in results["notes"] if note.startswith(("videos:", "window:", "decision:")))
    return Ladder(tuple(rungs), f"sightline eval ladder, {measured} of {len(LADDER)} rungs measured: {conditions}")


def _row(rows: Mapping[str, Any], rung: str) -> Mapping[str, Any] | None:
    row = rows.get(f"ladder {rung}", rows.get(_ALIASES.get(rung, "")))
    return row if isinstance(row, Mapping) and row.get("f1") is not None else None


def _share(row: Mapping[str, Any]) -> float:
    """Share of tokens kept per frame, independent of the frame rate."""
    return float(row["kept"]) / float(row["tokens_full"])


def _f1(row: Mapping[str, Any]) -> str:
    # There is no interval with too few videos.
    known = row["f1_low"] is not None
    return f"{row['f1']:.3f}" + (f" ({row['f1_low']:.2f} to {row['f1_high']:.2f})" if known else "")
