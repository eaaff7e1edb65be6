"""One attack on a real gateway process; an attack that fails by itself is an error, not a pass."""

import gateway_attacks
import pytest

from cluster.errors import SightlineError


def test_an_attack_has_a_row(tmp_path) -> None:
    row = gateway_attacks.measure_attack(tmp_path, "reflection", ())
    assert "status 16" in row["seen"], "the attack arrived, and was refused for want of a token"
    assert row["asked"] > 0
    assert (row["probes_missed"], row["clients_missed"]) == (0, 0)
    assert row["growth_mb"] < 64


def test_an_attack_that_breaks_is_told(tmp_path) -> None:
    with pytest.raises(SightlineError, match="the attack 'nothing of the kind' ended before its time"):
        gateway_attacks.measure_attack(tmp_path, "nothing of the kind", ())
