"""Footage that any decoder takes: GOPs that stand alone, from made scenes and from files; and profiles as data."""

from itertools import islice

import av
import pytest

from cluster.errors import ConfigError, SourceError
from cluster.lab.scenes.street_clips import make_clip
from loadtest.footage import gather, make_footage, read_footage
from loadtest.profile import PROFILES, Profile, packets, script


@pytest.fixture(scope="module")
def quiet():
    return make_footage("quiet", fps=5, size=(96, 64), seconds=8)


def test_made_footage_is_cut_into_gops(quiet) -> None:
    assert (quiet.header.codec, quiet.header.width, quiet.header.height) == ("h264", 96, 64)
    assert [(len(gop.packets), gop.duration) for gop in quiet.gops] == [(20, 4_000_000)] * 2
    assert sum(gop.duration for gop in quiet.gops) == 8_000_000
    assert sum(len(gop.packets) for gop in quiet.gops) == 40
    assert all(gop.packets[0].keyframe and gop.packets[0].pts == 0 for gop in quiet.gops)


def test_a_camera_can_be_decoded_from_its_first_packet_over_many_loops(quiet) -> None:
    """Every packet gives its picture, in order, at its time."""
    profile = Profile(mix={"quiet": 1.0}, fps=5)
    codec = av.CodecContext.create("h264", "r")
    shown = []
    for due in islice(packets(profile, script(profile, 3), {"quiet": quiet}), 100):
        packet = av.Packet(due.packet.data)
        packet.pts = due.packet.pts
        shown += [frame.pts for frame in codec.decode(packet)]
    shown += [frame.pts for frame in codec.decode(None)]
    assert shown == [number * 200_000 for number in range(100)]


def test_reordered_pictures_stay_within_their_gop(tmp_path) -> None:
    path = tmp_path / "noisy.mp4"
    make_clip("noisy", path, seconds=8, fps=5, size=(96, 64))
    noisy = read_footage(path)
    assert noisy.name == "noisy"
    for gop in noisy.gops:
        assert sorted(packet.pts for packet in gop.packets) == [number * 200_000 for number in range(len(gop.packets))]
        assert [packet.pts for packet in gop.packets] != sorted(packet.pts for packet in gop.packets)


def test_what_is_no_footage_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="'bussy'; use one of busy"):
        gather(["bussy"], fps=5, size=(96, 64))
    rubbish = tmp_path / "rubbish.mp4"
    rubbish.write_bytes(b"no video" * 100)
    with pytest.raises(SourceError, match=r"rubbish.mp4"):
        gather([str(rubbish)], fps=5, size=(96, 64))
    clip = tmp_path / "clip.mp4"
    make_clip("street", clip, seconds=2, fps=5, size=(64, 64))
    with pytest.raises(ConfigError, match="one codec and size, not h264 64x64, h264 96x64"):
        gather(["quiet", str(clip)], fps=5, size=(96, 64))


def test_every_shipped_profile_can_be_loaded_and_says_what_it_is() -> None:
    assert {"steady", "busy", "aligned", "churn", "storm", "jitter", "day"} <= set(PROFILES.names())
    for name in PROFILES.names():
        assert PROFILES.load(name).about.endswith(".")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streems: 3", "streems"),
        ("streams: 0", "streams"),
        ("mix: {busy: -1}", "mix"),
        ("mix: {}", "mix"),
        ("loss: 1.5", "loss"),
        ("phases: odd", "phases"),
        ("- a list", "must be a mapping"),
        ("{", "not valid YAML"),
    ],
)
def test_a_wrong_profile_is_refused_by_its_key(tmp_path, text, message) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        PROFILES.load(str(path))
    path.write_text("streams: 3\nmix: {busy: 2, quiet: 1}")
    assert PROFILES.load(str(path)).streams == 3


def test_an_unknown_profile_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'stedy'.*aligned, busy"):
        PROFILES.load("stedy")
