import pytest

from cluster.lab.scenes.vocabulary import SceneEvent, window_label


@pytest.mark.parametrize(
    ("kind", "start", "end", "window", "label"),
    [
        ("fall", 10, 40, (0, 20), True),
        ("fall", 10, 40, (20, 40), True),
        ("fall", 18.5, 40, (0, 20), None),
        ("fall", 25, 40, (0, 20), False),
        ("fight", 10, 18, (12, 32), True),
        ("fight", 10, 18, (16, 36), None),
        ("fight", 10, 18, (18, 38), False),
        ("stopped_vehicle", 10, 40, (0, 14), None),
        ("stopped_vehicle", 10, 40, (0, 15), True),
        # Seven tenths of a short crossing are enough.
        ("wrong_way", 10, 12, (0, 11.5), True),
        ("wrong_way", 10, 12, (0, 11.2), None),
        # A bag is known to be left only to those who saw it being left.
        ("left_object", 10, 40, (8, 28), True),
        ("left_object", 10, 40, (9, 29), None),
        ("left_object", 10, 40, (20, 40), None),
        ("left_object", 10, 15, (20, 40), None),
    ],
)
def test_what_a_window_shows(kind, start, end, window, label):
    assert window_label([SceneEvent(kind, start, end, (0,))], kind, *window) is label


def test_other_kinds_do_not_count_and_one_clear_event_is_enough():
    events = [SceneEvent("fall", 5, 15, (0,)), SceneEvent("fight", 19, 28, (1,)), SceneEvent("fight", 4, 12, (2,))]
    assert window_label(events, "wrong_way", 0, 20) is False
    assert window_label(events, "fight", 0, 20) is True
    assert window_label(events[:2], "fight", 0, 20) is None
