"""Removed cameras are forgotten by every replica, also by those that were down."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.control.camera_record import ORDERS, DeletionTracker


def test_the_order_stays_until_every_replica_has_carried_it_out() -> None:
    removals = DeletionTracker(2)
    assert removals.add("gate") == []
    assert removals.orders_for("a") == removals.orders_for("b") == {"gate": True}
    assert removals.confirm("a", ["gate"], {"a", "b"}).done == []
    assert removals.orders_for("a") == {}
    assert removals.orders_for("b") == {"gate": True}
    assert removals.confirm("b", ["gate"], {"a", "b"}).done == ["gate"]
    assert removals.pending_cameras == []
    assert removals.orders_for("c") == {}


def test_a_replica_that_is_down_is_waited_for_and_its_successor_forgets_too() -> None:
    removals = DeletionTracker(2)
    removals.add("gate")
    assert removals.confirm("a", ["gate"], {"a"}).done == []
    assert removals.orders_for("c") == {"gate": True}
    # It is alive and has not said so yet.
    assert removals.confirm("a", [], {"a", "c"}).done == []
    assert removals.confirm("c", ["gate"], {"a", "c"}).done == ["gate"]


def test_what_was_begun_before_a_restart_goes_on() -> None:
    removals = DeletionTracker(1, {"gate": False})
    assert removals.orders_for("a") == {"gate": True}


def test_removed_again_is_forgotten_again() -> None:
    removals = DeletionTracker(2)
    removals.add("gate")
    removals.confirm("a", ["gate"], {"a", "b"})
    removals.add("gate")
    assert removals.orders_for("a") == {"gate": True}


def test_a_replica_that_was_sent_frames_once_more_forgets_once_more() -> None:
    removals = DeletionTracker(1)
    removals.add("gate")
    removals.confirm("a", ["gate"], {"a"})
    assert removals.orders_for("a", ["gate", "yard"], ["yard"]) == {"gate": True}
    # It was added anew.
    assert removals.orders_for("a", ["gate", "yard"], ["gate", "yard"]) == {}
    # Nobody removed that one.
    assert removals.orders_for("a", ["dock"], ["yard"]) == {}


def test_a_camera_added_under_the_name_of_a_removed_one_keeps_what_all_replicas_share() -> None:
    """A replica is down, and the others have deleted the removed one: what is shared is the new one's from then on."""
    removals = DeletionTracker(2)
    removals.add("gate")
    # Not before: the removed one's may still be there.
    assert removals.orders_for("a", cameras=["gate"]) == {"gate": True}
    assert removals.confirm("a", ["gate"], {"a"}) == ([], ["gate"])
    assert removals.confirm("a", [], {"a"}) == ([], []), "told once"
    for late in ("b", "a-restarted"):
        assert removals.orders_for(late, cameras=["gate"]) == {"gate": False}
        # There is no camera of that name any more.
        assert removals.orders_for(late) == {"gate": True}
        # A controller that has just started does not know.
        assert removals.orders_for(late, ["gate"], None) == {}
    restarted = DeletionTracker(2, {"gate": True, "yard": False})
    assert restarted.orders_for("a", ["gate"], None) == {"yard": True}
    assert restarted.orders_for("a", ["gate"], ["gate", "yard"]) == {"gate": False, "yard": True}
    removals.add("gate")
    assert removals.orders_for("b", cameras=["gate"]) == {"gate": True}, "removed once more"
    assert removals.confirm("b", ["gate"], {"a", "b"}) == ([], [])
    assert removals.confirm("a", ["gate"], {"a", "b"}) == (["gate"], [])


def test_no_more_wait_than_the_limit() -> None:
    removals = DeletionTracker(1, limit=2)
    assert removals.add("one") == removals.add("two") == []
    assert removals.add("three") == ["one"]
    assert removals.pending_cameras == ["two", "three"]


def test_a_heartbeat_tells_of_so_many() -> None:
    removals = DeletionTracker(1)
    for number in range(ORDERS + 5):
        removals.add(f"cam-{number}")
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
        holds[place] -= set(orders)
        removals.confirm(instance, orders, alive)

    for place, event in events:
        if event == "remove":
            removals.add("gate")
            removed = True
        elif event == "die":
            starts[place] += 1
        else:
            beat(place)
    if removed and not removals.pending_cameras:
        assert not any(holds.values())
    for place in "abc":
        beat(place)
    assert removed is False or not any(holds.values())
    assert removals.pending_cameras == []
