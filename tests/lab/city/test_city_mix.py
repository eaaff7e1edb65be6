"""A city's cameras as data: shares, days, geometry, and what is refused."""

import math

import pytest

from cluster.errors import ConfigError
from cluster.lab.city.mix import MIXES, ActivitySection, CameraClass, GeometrySection, Mix
from cluster.types.cameras import Priority

ONE = """
classes:
  - name: street
    share: 3
    activity: {busy: 0.5}
  - name: yard
    share: 1
    priority: background
    stride_s: 16s
    activity: {busy: 0.1}
"""


def test_every_shipped_mix_loads_and_says_what_it_is():
    assert set(MIXES.names()) == {"city", "night", "station", "steady"}
    assert all(MIXES.load(name).title for name in MIXES.names())


def test_counts_add_up_and_follow_the_shares():
    mix = MIXES.parse(ONE, "one")
    assert mix.counts(8) == [6, 2]
    assert mix.counts(7) == [5, 2]
    assert all(sum(MIXES.load("city").counts(n)) == n for n in range(1, 40))


def test_a_class_becomes_a_demand():
    mix = MIXES.parse(ONE, "one")
    demand = mix.classes[1].demand("yard-1", mix.geometry, 12.0)
    assert (demand.camera, demand.priority, demand.stride_s) == ("yard-1", Priority.BACKGROUND, 16.0)
    # 1920x1080 within 448x448 pixels: 597x336, hence 21 by 12 tokens of 28 pixels.
    assert demand.frame_tokens == 21 * 12
    # Of the quiet windows of a stretch, every fourth is computed where answers stand 48 s and more (64 s are the first
    # time beyond with 16 s strides), and every third where they stand less, which is so for 8 s of the 20 by which
    # cameras differ. A stretch ends after each window with the chain's probability.
    ends = 0.1 * (1 - math.exp(-16 / (0.9 * 60)))
    lengths = {n: ends * (1 - ends) ** (n - 1) for n in range(1, 3000)}
    idle = sum(share * (0.6 * (n // 4) + 0.4 * (n // 3)) for n, share in lengths.items()) * ends
    assert demand.busy == pytest.approx(0.1 + 0.9 * idle)
    # After a gated one come those in between, and the first of a busy stretch unless one of those came just before.
    just = sum(share * (0.6 * (n % 4 == 0) + 0.4 * (n % 3 == 0)) for n, share in lengths.items())
    resumed = 0.9 * (idle + ends * (1 - just))
    assert demand.resumed == pytest.approx(resumed / demand.busy, rel=1e-3)
    assert demand.gated == pytest.approx((1 - demand.busy) / resumed, rel=1e-3)


def test_frame_tokens_may_be_given():
    given = CameraClass(name="x", share=1, frame_tokens=77, activity=ActivitySection(busy=1.0))
    assert given.demand("x", GeometrySection(), 0.0).frame_tokens == 77


def test_the_busy_share_follows_the_hour():
    profile = [1.0] * 24
    profile[8] = 2.0
    activity = ActivitySection(busy=0.3, profile=tuple(profile))
    assert activity.share(8.5) == pytest.approx(0.6)
    assert activity.share(9.0) == pytest.approx(0.45)
    assert activity.share(20.0) == pytest.approx(0.3)
    # The day goes round, and no camera of which less than all windows are busy is always busy.
    assert activity.share(24.5) == activity.share(0.5)
    assert ActivitySection(busy=0.9, profile=(2.0,) * 24).share(3.0) == 0.98
    # Cameras that always see motion by day follow their hours, too.
    day = ActivitySection(busy=1.0, profile=(0.2,) * 12 + (1.0,) * 12)
    assert (day.share(6.0), day.share(18.0)) == (0.2, 1.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("classes: []", "classes"),
        (ONE.replace("share: 3", "share: 0"), "one:4: classes\\[0\\].share"),
        (ONE.replace("name: yard", "name: street"), "must have unique names"),
        (ONE.replace("stride_s: 16s", "stride_s: 60s"), "stride_s must be at most window_s"),
        (ONE.replace("busy: 0.5", "busy: 0.5, profile: [1, 2]"), "24 factors"),
        (ONE.replace("busy: 0.5", "buzy: 0.5"), "did you mean 'busy'"),
        (ONE + "bursts: [{name: rain, every_s: 1h, duration_s: 60, share: 0.5, classes: [roof]}]", "'roof'"),
    ],
)
def test_what_is_wrong_is_said(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        MIXES.parse(text, "one")


def test_unknown_mixes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no mix 'towm'.*city"):
        MIXES.load("towm")
    with pytest.raises(ConfigError, match=r"there is no mix .*none\.yaml"):
        MIXES.load(str(tmp_path / "none.yaml"))
    (tmp_path / "mine.yaml").write_text(ONE)
    assert isinstance(MIXES.load(str(tmp_path / "mine.yaml")), Mix)
