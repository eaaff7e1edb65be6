"""The search against clusters whose limit is known."""

import json
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.cli.loadtest import _config, _profile, _search
from cluster.errors import ConfigError, SightlineError
from loadtest.search import GAP, Search, Try, Wanted


def drive(search: Search, stable, limit: str = "cluster") -> list[Wanted]:
    """Answer every question of the search; ``stable(streams, number of try)``."""
    asked = []
    while (wanted := search.next()) is not None:
        asked.append(wanted)
        assert len(asked) < 400, "the search does not end"
        good = stable(wanted.streams, len(asked))
        search.tries.append(Try(wanted.streams, good, wanted.phase, wanted.fresh, None if good else limit))
    return asked


def test_it_doubles_halves_and_then_adds_one_at_a_time() -> None:
    search = Search(first=8)
    asked = drive(search, lambda streams, _: streams <= 21)
    assert [each.streams for each in asked if each.phase == "coarse"] == [8, 8, 16, 16, 32, 24, 20, 20, 22, 21, 21]
    assert [(each.streams, each.fresh) for each in asked if each.phase == "fine"] == [
        (21, True),
        (21, False),
        (22, False),
    ]
    assert (search.stable, search.limit) == (21, "cluster")


@given(st.integers(1, 3000), st.integers(1, 64))
def test_it_finds_every_limit(true: int, first: int) -> None:
    search = Search(first=first)
    asked = drive(search, lambda streams, _: streams <= true)
    assert search.stable == true
    # Twice each, but no more tries than doubling, halving and one-at-a-time need.
    assert len(asked) <= 2 * (2 * max(true, first).bit_length() + GAP * 2 * true + 6)


def test_nothing_is_stable() -> None:
    search = Search(first=8)
    assert [each.streams for each in drive(search, lambda *_: False)] == [8, 4, 2, 1]
    assert search.stable == 0


def test_once_is_not_twice() -> None:
    """Sixteen streams are stable every other time: never twice in a row."""
    search = Search(first=8)
    drive(search, lambda streams, number: streams < 16 or (streams == 16 and number % 2 == 1))
    assert search.stable == 15


def test_the_generators_limit_ends_it() -> None:
    search = Search(first=8)
    drive(search, lambda streams, _: streams <= 16, limit="generator")
    assert (search.stable, search.limit) == (16, "generator")
    assert [each.streams for each in search.tries] == [8, 8, 16, 16, 32]


def test_a_fresh_start_that_is_not_stable_begins_lower() -> None:
    search = Search(first=64, most=64)
    drive(search, lambda streams, number: streams <= 60 or number <= 2)
    fine = [each for each in search.tries if each.phase == "fine"]
    assert [(each.streams, each.fresh) for each in fine[:2]] == [(64, True), (60, True)]
    assert search.stable == 60


def test_nobody_looks_beyond_most() -> None:
    search = Search(first=8, most=20)
    drive(search, lambda *_: True)
    assert (search.stable, search.limit) == (20, None)
    assert max(each.streams for each in search.tries) == 20


@given(st.integers(1, 200), st.integers(0, 30))
def test_an_interrupted_search_goes_on_where_it_was(tmp_path_factory, true: int, stop: int) -> None:
    path = tmp_path_factory.mktemp("state") / "search.json"
    whole = Search(settings={"profile": "steady"})
    drive(whole, lambda streams, _: streams <= true)
    begun = Search(settings={"profile": "steady"})
    for _ in range(stop):
        wanted = begun.next()
        if wanted is None:
            break
        begun.tries.append(Try(wanted.streams, wanted.streams <= true, wanted.phase, wanted.fresh))
    begun.save(path)
    resumed = Search(settings={"profile": "steady"})
    assert resumed.load(path) == len(begun.tries)
    drive(resumed, lambda streams, _: streams <= true)
    assert [t.streams for t in resumed.tries] == [t.streams for t in whole.tries]


def test_a_state_of_another_search_is_refused(tmp_path) -> None:
    path = tmp_path / "search.json"
    assert Search().load(path) == 0
    Search(settings={"profile": "steady", "fps": 5}).save(path)
    with pytest.raises(ConfigError, match=r"other settings \(profile\)"):
        Search(settings={"profile": "storm", "fps": 5}).load(path)
    for rubbish in ("", "[]", json.dumps({"tries": [{"streams": 1}], "settings": {}})):
        path.write_text(rubbish)
        with pytest.raises(ConfigError, match="not the state of a search"):
            Search().load(path)
    with pytest.raises(SightlineError, match="cannot write"):
        Search().save(tmp_path / "missing" / "search.json")


def test_a_state_of_another_cluster_is_refused(tmp_path) -> None:
    """Told apart by the gateway's address alone: the settings of a running cluster are not known here."""
    path = tmp_path / "search.json"

    def begin(gateway: str | None) -> Search:
        config = _config(None, gateway or "127.0.0.1:1", None)
        return _search(config, "busy", _profile("busy"), 8, 2048, path, Mock(), gateway=gateway)[0]

    first = begin("10.0.0.5:50051")
    first.tries.append(Try(8, True, "coarse"))
    first.save(path)
    assert begin("10.0.0.5:50051").tries == first.tries
    for other in ("10.0.0.99:50051", None):
        with pytest.raises(ConfigError, match=r"other settings \(gateway\)"):
            begin(other)
