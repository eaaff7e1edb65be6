"""How busy a decoder's slots are, which decides how many decoders there are."""

import pytest

from cluster.decoder import decode_load
from cluster.decoder.decode_load import DecodeGate


def test_busy_share_is_that_of_all_slots_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(decode_load.time, "monotonic", lambda: now_s[0])
    gate = DecodeGate(2)
    with gate:
        now_s[0] += 3
        with gate:
            now_s[0] += 1
    now_s[0] += 4
    # One slot for 4 s and the other for 1 s, of 2 slots in 8 s.
    assert gate.take_busy_share() == pytest.approx(5 / 16)
    assert gate.take_busy_share() == 0, "no time has passed"
    with gate:
        now_s[0] += 1
        assert gate.take_busy_share() == pytest.approx(0.5), "also while it is in use"
