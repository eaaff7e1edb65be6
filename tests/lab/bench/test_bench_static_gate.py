"""The part of ``bench faults`` about the static gate: what it counts of gates that hold, and of ones that do not."""

from functools import partial

import pytest

from cluster.lab.bench.faults import GOALS, static_gate
from cluster.lab.bench.harness import against_goals
from cluster.types import StreamSpec


@pytest.mark.parametrize(("holds", "met"), [(True, ["yes", "yes"]), (False, ["yes", "no"])])
def test_a_gate_that_never_holds_misses_nothing_and_fails_all_the_same(monkeypatch, holds, met):
    monkeypatch.setattr(static_gate, "OBJECTS", 2)
    monkeypatch.setattr(static_gate, "StreamSpec", partial(StreamSpec, static_gate=holds))
    part = static_gate.measure(seed=0)
    assert part.figures == {"gate_missed": 0.0, "quiet_gated": float(holds)}
    assert [row["met"] for row in against_goals(GOALS, "static_gate", part.figures)] == met
