"""What the prefetch bench counts, and the picture it draws; how well it does is the bench's to say."""

import xml.etree.ElementTree as ET

import pytest
from tooltips import get_tooltips

from cluster.lab.bench.memory.prefetch import Compute, measure_prefetch, timeline
from cluster.lab.report.charts import svg
from cluster.memory.prefetch import FetchEvent


def test_a_right_prediction_is_all_used_and_only_the_first_layer_is_loaded_when_wanted() -> None:
    done = measure_prefetch(0.02, layers=4, compute_s=0.04, blocks_per_layer=6)
    assert (done.stats.predicted, done.stats.used, done.stats.missed, done.stats.wasted) == (18, 18, 6, 0)
    assert {event.layer for event in done.events if not event.predicted} == {0}
    assert sum(event.blocks for event in done.events) == 24
    assert [one.layer for one in done.computes] == [0, 1, 2, 3]
    assert all(one.ended_s - one.began_s >= 0.04 for one in done.computes)
    assert all(event.ended_s - event.began_s >= 0.02 for event in done.events)
    assert done.transfer_s >= 4 * 0.02
    assert done.hidden == 1 - done.stats.waited_s / done.transfer_s


def test_a_prediction_that_is_wrong_throughout_hides_nothing() -> None:
    done = measure_prefetch(0.02, layers=4, compute_s=0.001, blocks_per_layer=6, accuracy=0.0)
    assert (done.stats.used, done.stats.missed, done.stats.wasted) == (0, 24, 18)
    assert done.stats.waited_s >= 4 * 0.02


def test_errors_are_spread_evenly_over_the_layers() -> None:
    done = measure_prefetch(0.0, layers=9, compute_s=0.0, blocks_per_layer=4, accuracy=0.875)
    # Half a block a layer: of the eight layers that are predicted, four miss one.
    missed = [event.blocks for event in done.events if not event.predicted and event.layer > 0]
    assert missed == [1] * 4
    assert (done.stats.missed, done.stats.wasted) == (8, 4)


def test_the_picture_has_a_bar_for_each_load_and_each_layer_to_scale() -> None:
    events = [FetchEvent(0, 5.0, 5.010, 4, 64, False), FetchEvent(1, 5.010, 5.030, 4, 64, True)]
    computes = [Compute(0, 5.010, 5.030), Compute(1, 5.030, 5.050)]
    figure = timeline(events, computes)
    (axes,) = figure.axes
    bars = {get_tooltips(bar)[0]: bar for bar in axes.patches}
    titles = {element.text for element in ET.fromstring(svg(figure)).iter("{http://www.w3.org/2000/svg}title")}
    assert titles == set(bars)
    assert axes.get_xlabel() == "milliseconds"
    for text, began, took in (
        ("layer 0 computes for 20.00 ms", 10, 20),
        ("layer 1 computes for 20.00 ms", 30, 20),
        ("4 blocks (64 bytes) of layer 0 loaded on demand in 10.00 ms", 0, 10),
        ("4 blocks (64 bytes) of layer 1 prefetched in 20.00 ms", 10, 20),
    ):
        bar = bars.pop(text)
        assert (bar.get_x(), bar.get_width()) == pytest.approx((began, took))
        # In the row of its layer.
        assert round(bar.get_y() + bar.get_height() / 2) == int(text.split("layer ")[1].split()[0])
    assert not bars


def test_nothing_makes_no_picture() -> None:
    with pytest.raises(ValueError, match="at least one"):
        timeline([], [])
