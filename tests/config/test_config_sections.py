"""What contradicts itself in one section, or between two, is refused in a sentence."""

import typing

import pytest

from cluster.config import CameraEntry, InvalidConfigError, camera_settings, load_config
from cluster.errors import ConfigError
from cluster.types.cameras import is_open_question


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
def test_clips_that_do_not_go_together(clips, says):
    with pytest.raises(InvalidConfigError, match=says.replace("+", r"\+")):
        load_config(None, {"clips": clips})


def test_what_would_have_no_effect_is_refused():
    with pytest.raises(InvalidConfigError, match="longest_s = 5 must be at least first_s = 30"):
        load_config(None, {"alerts": {"retry": {"first_s": 30, "longest_s": 5}}})
    with pytest.raises(InvalidConfigError, match="levels omits redis, so nothing would be stored at redis_url"):
        load_config(None, {"tiers": {"levels": ["host", "node"], "redis_url": "redis://localhost"}})
    with pytest.raises(InvalidConfigError, match="levels must name host, redis in this order"):
        load_config(None, {"tiers": {"levels": ["redis", "host"], "redis_url": "redis://localhost"}})
    for kind in ("remote", "host"):
        with pytest.raises(InvalidConfigError, match=f"options of {kind} have no effect"):
            load_config(None, {"tiers": {"options": {kind: {"size": 3}}}})


def test_sizes_and_times_of_clips_as_people_write_them():
    clips = load_config(None, {"clips": {"max_bytes": "2GiB", "retention": "7d", "url": "https://a.example/"}}).clips
    assert (clips.max_bytes, clips.retention, clips.url) == (2**31, 7 * 86_400, "https://a.example")


@pytest.mark.parametrize(
    "text", ["Describe the scene", "What happened?", "how many people are there?", " Who came in?"]
)
def test_a_standing_question_that_asks_for_more_than_yes_or_no(text):
    with pytest.raises(InvalidConfigError, match="asks for more than yes or no"):
        load_config(None, {"questions": [{"id": "q", "text": text}]})


@pytest.mark.parametrize(
    "text", ["Is anyone there?", "When a car stops, does it block the gate?", "Ist jemand da?", "?"]
)
def test_a_standing_question_that_is_taken(text):
    assert not is_open_question(text)


def test_a_batch_of_vllm_must_be_given_up_before_its_replica_is():
    times = {"vllm": {"timeout_s": 90}, "cluster": {"stall_timeout_s": 90}}
    with pytest.raises(ConfigError, match=r"vllm\.timeout_s.*must be below cluster\.stall_timeout_s = 90"):
        load_config(None, {"engine": "vllm", **times})
    assert load_config(None, times).vllm.timeout_s == 90
    assert load_config(None, {"engine": "vllm", **times, "cluster": {"stall_timeout_s": 91}}).engine == "vllm"


def test_vllm_computes_what_cameras_send():
    """A key that promised full windows changed nothing: pruning is the cameras'."""
    with pytest.raises(InvalidConfigError, match=r"vllm\.mode"):
        load_config(None, {"engine": "vllm", "vllm": {"mode": "full"}})


def test_a_policys_parameters_are_looked_up_once_for_all_cameras(monkeypatch) -> None:
    """Resolving a hint compiles it: eight tenths of the time that the controller took for a camera that was added."""
    calls, resolve = [], typing.get_type_hints
    config = load_config(None, {"questions": [{"id": "q", "text": "Fire?"}]})
    monkeypatch.setattr(typing, "get_type_hints", lambda *a, **k: calls.append(a) or resolve(*a, **k))
    for number in range(20):
        camera_settings(config, CameraEntry(name=f"cam-{number}"))
    assert len(calls) <= 1
