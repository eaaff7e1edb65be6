"""Removed cameras are forgotten by every replica, also by those that were down."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.control.camera_record import ORDERS, DeletionTracker


def test_the_order_stays_until_every_replica_has_carried_it_out() -> None:
    removals = DeletionTracker(2)
    assert removals.add("1", "gate") == {}
    assert removals.orders_for("a") == removals.orders_for("b") == {"1": "gate"}
    assert removals.confirm("a", ["1"], {"a", "b"}) == []
    assert removals.orders_for("a") == {}
    assert removals.orders_for("b") == {"1": "gate"}
    assert removals.confirm("b", ["1"], {"a", "b"}) == ["1"]
    assert removals.pending == {}
    assert removals.orders_for("c") == {}


def test_a_replica_that_is_down_is_waited_for_and_its_successor_forgets_too() -> None:
    removals = DeletionTracker(2)
    removals.add("1", "gate")
    assert removals.confirm("a", ["1"], {"a"}) == []
    assert removals.orders_for("c") == {"1": "gate"}
    # It is alive and has not said so yet.
    assert removals.confirm("a", [], {"a", "c"}) == []
    assert removals.confirm("c", ["1"], {"a", "c"}) == ["1"]


def test_what_was_begun_before_a_restart_goes_on() -> None:
    removals = DeletionTracker(1, {"1": "gate"})
    assert removals.orders_for("a") == {"1": "gate"}


def test_removed_again_is_forgotten_again() -> None:
    removals = DeletionTracker(2)
    removals.add("1", "gate")
    removals.confirm("a", ["1"], {"a", "b"})
    removals.add("2", "gate")
    assert removals.orders_for("a") == {"2": "gate"}
    assert removals.orders_for("b") == {"1": "gate", "2": "gate"}


def test_a_replica_that_was_sent_frames_once_more_forgets_once_more() -> None:
    removals = DeletionTracker(1)
    removals.add("1", "gate")
    removals.confirm("a", ["1"], {"a"})
    # Also where another one has its name by now.
    assert removals.orders_for("a", ["1", "2"]) == {"1": "gate"}
    # Nobody removed that one.
    assert removals.orders_for("a", ["2"]) == {}


def test_no_more_wait_than_the_limit() -> None:
    removals = DeletionTracker(1, limit=2)
    assert removals.add("1", "one") == removals.add("2", "two") == {}
    assert removals.add("3", "three") == {"1": "one"}
    assert [*removals.pending] == ["2", "3"]


def test_a_heartbeat_tells_of_so_many() -> None:
    removals = DeletionTracker(1)
    for number in range(ORDERS + 5):
        removals.add(f"life-{number}", f"cam-{number}")
    first = removals.orders_for("a")
    assert len(first) == ORDERS
    removals.confirm("a", first, {"a"})
    assert len(removals.orders_for("a")) == 5


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["die", "beat", "remove"])), max_size=60))
def test_whoever_is_alive_in_the_end_has_forgotten(events: list[tuple[str, str]]) -> None:
    """Replicas die and come back under new names; what ends as forgotten is held by none that ever ran."""
    removals, starts = DeletionTracker(3), dict.fromkeys("abc", 0)
    holds = {place: {"gate"} for place in "abc"}
    removed = False

    def beat(place: str) -> None:
        instance, alive = f"{place}{starts[place]}", {f"{each}{starts[each]}" for each in "abc"}
        orders = removals.orders_for(instance)
        holds[place] -= set(orders.values())
        removals.confirm(instance, orders, alive)

    for place, event in events:
        if event == "remove":
            removals.add("1", "gate")
            removed = True
        elif event == "die":
            starts[place] += 1
        else:
            beat(place)
    if removed and not removals.pending:
        assert not any(holds.values())
    for place in "abc":
        beat(place)
    assert removed is False or not any(holds.values())
    assert not removals.pending
