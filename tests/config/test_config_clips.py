"""``clips:`` what does not go together is refused in a sentence."""

import pytest

from cluster.config import InvalidConfigError, load_config


@pytest.mark.parametrize(
    ("clips", "says"),
    [
        ({"before_s": "2m", "after_s": "1m"}, "longest_s = 120 must be at least before_s + after_s = 180"),
        ({"ring_bytes": "8MiB"}, "must be at least ring_camera_bytes"),
        ({"url": "sightline.example"}, "must begin with http:// or https://"),
        ({"retention": "0s"}, "greater than or equal to 1"),
        ({"kept": 1}, "kept"),
    ],
)
def test_what_does_not_go_together(clips, says):
    with pytest.raises(InvalidConfigError, match=says.replace("+", r"\+")):
        load_config(None, {"clips": clips})


def test_sizes_and_times_as_people_write_them():
    clips = load_config(None, {"clips": {"max_bytes": "2GiB", "retention": "7d", "url": "https://a.example/"}}).clips
    assert (clips.max_bytes, clips.retention, clips.url) == (2**31, 7 * 86_400, "https://a.example")
