"""Which sources a camera may have: known schemes, existing files, and files below the configured folders only."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster import models
from cluster.config import camera_settings, load_config, parse_camera
from cluster.config.sources import bundled_remark, check_files, file_roots
from cluster.decoder.pipeline import make_source
from cluster.errors import ConfigError, SourceError


def config(source: str = "", **security: Any):
    cameras = [{"name": "gate", "source": source}]
    return load_config(None, {"questions": [{"id": "q", "text": "Fire?"}], "cameras": cameras, "security": security})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rstp://10.0.0.1/1", "unknown scheme; did you mean 'rtsp'?"),
        ("gopher://10.0.0.1/1", "unknown scheme; there are: rtsp, rtsps, http"),
        ("rtsp://", "names no host"),
        ("v4l2:///", "names no path"),
        # FFmpeg writes the address into its request as it is: these would be commands to whatever listens there.
        ("rtsp://10.0.0.1:6379/\r\nFLUSHALL\r\n", "holds a control character"),
        ("rtsp://10.0.0.1:8265/ HTTP/1.1\nHost: x\n\nPOST /api/jobs/", "holds a control character"),
        ("http://10.0.0.1/\x1b[2J", "holds a control character"),
        # To tell what of it is a password takes the longer the more of it may be one.
        ("rtsp://h" + "/@" * 2**16, "at most 4096 characters"),
        ("rstp://viewer:hunter22@10.0.0.1/1", r"rstp://viewer:\*\*\*@10.0.0.1/1 has an unknown scheme"),
    ],
)
def test_an_address_that_cannot_be_opened_is_refused(source: str, message: str) -> None:
    for refuse in (lambda: parse_camera("gate", source), lambda: config(source)):
        with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace("(", r"\(")) as failure:
            refuse()
        assert "hunter22" not in str(failure.value)


@pytest.mark.parametrize(
    "source",
    ["", "rtsp://10.0.0.1/1", "RTSPS://u:p@cam/1", "https://cam/live.m3u8", "rtmp://cam/live/k", "v4l2:///dev/video0"],
)
def test_an_address_that_can_be_opened_is_taken(source: str) -> None:
    check_files(config(file_roots=["/dev"]), parse_camera("gate", source.replace("/dev/video0", "/dev/null")))


def test_authorities_of_cameras_added_later_are_the_configured_ones_or_below_the_named_folders(tmp_path: Path) -> None:
    loaded = load_config(None, {"source": {"ca_file": "/etc/ca.pem"}, "security": {"file_roots": [str(tmp_path)]}})

    def added(ca_file: str):
        return parse_camera("new", "rtsps://10.0.0.1/1", settings={"source_options": {"ca_file": ca_file}})

    check_files(loaded, added("/etc/ca.pem"))
    check_files(loaded, added(str(tmp_path / "ca.pem")))
    with pytest.raises(ConfigError, match=r"ca_file: /etc/passwd is not below a folder of security\.file_roots"):
        check_files(loaded, added("/etc/passwd"))


def test_files_of_cameras_added_later_lie_below_the_named_folders(tmp_path: Path) -> None:
    allowed, secret = tmp_path / "clips", tmp_path / "secret.mp4"
    allowed.mkdir()
    secret.touch()
    (allowed / "a.mp4").touch()
    (allowed / "link.mp4").symlink_to(secret)
    loaded = config(file_roots=[str(allowed)])
    check_files(loaded, parse_camera("new", str(allowed / "a.mp4")))
    check_files(loaded, parse_camera("by", f"file://{allowed}/a.mp4"))
    told = set()
    for path in (
        secret,
        tmp_path / "missing.mp4",
        allowed / ".." / "secret.mp4",
        allowed / "link.mp4",
        "v4l2:///dev/null",
    ):
        with pytest.raises(ConfigError, match=r"is not below .*clips \(security\.file_roots\)") as failure:
            check_files(loaded, parse_camera("new", str(path)))
        told.add(str(failure.value).replace(str(path), ""))
    # It does not tell which of them exist.
    assert len(told) == 1
    with pytest.raises(ConfigError, match="files are not allowed"):
        check_files(config(file_roots=[]), parse_camera("new", str(secret)))


def test_a_missing_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="camera new: source: there is no file notaurl; name a video file"):
        check_files(config(), parse_camera("new", "notaurl"))
    # Longer than a file's name can be.
    with pytest.raises(ConfigError, match=r"there is no file a+; name a video file"):
        check_files(config(), parse_camera("new", "a" * 300))
    (tmp_path / "notaurl").touch()
    check_files(config(), parse_camera("new", "notaurl"))
    check_files(config(), parse_camera("new", "demo://gate"))
    with pytest.raises(ConfigError, match="there is no bundled clip 'nowhere'; there are: "):
        check_files(config(), parse_camera("new", "demo://nowhere"))


def test_files_of_the_configuration_itself_may_be_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "gate.mp4"
    loaded = config(str(path), file_roots=[])
    assert file_roots(loaded, loaded.cameras[0].source) is None
    with pytest.raises(ConfigError, match="there is no file"):
        check_files(loaded, *loaded.cameras)
    path.touch()
    check_files(loaded, *loaded.cameras)


def test_a_decoder_opens_no_file_that_is_not_allowed(tmp_path: Path) -> None:
    """Whatever the controller let through: a link may have been put there since."""
    from cluster.config import camera_settings

    loaded = config(file_roots=[str(tmp_path / "clips")])
    settings = camera_settings(loaded, parse_camera("new", "/etc/hostname"))
    with pytest.raises(SourceError, match="is outside the folders"):
        make_source(settings, loaded).open()


def test_a_ray_cluster_allows_no_files_unless_it_names_folders() -> None:
    overrides = {
        "questions": [{"id": "q", "text": "Fire?"}],
        "cluster": {"ray_address": "auto"},
        "security": {"allow_plain_inside": True},
    }
    source = parse_camera("new", "clip.mp4").source
    assert file_roots(load_config(None, overrides), source) == ()
    assert file_roots(config(), source) == (Path(),)


def test_of_pictures_and_questions_that_the_bundled_model_does_not_know_it_is_said(tmp_path: Path) -> None:
    """Its folder names what it was taught."""
    taught = json.loads((Path(models.__file__).parent / "demo" / "sightline.json").read_text())["questions"]
    (tmp_path / "drawn.mp4").touch()
    (tmp_path / "drawn.json").touch()
    (tmp_path / "real.mp4").touch()

    def said(source: str, question: str = taught["fall"], **changes: Any) -> str:
        loaded = load_config(None, {"questions": [{"id": "q", "text": question}], **changes})
        return bundled_remark(loaded, camera_settings(loaded, parse_camera("gate", source)))

    for known in ("demo://gate", "", str(tmp_path / "drawn.mp4"), f"file://{tmp_path}/drawn.mp4"):
        assert said(known) == ""
        assert said(known, "Is anyone climbing the fence?") == (
            "answers mean little: the bundled model (demo) knows drawn scenes and 6 questions, "
            "not 'Is anyone climbing the fence?'; name a checkpoint in model.name"
        )
    for real in ("rtsp://10.0.0.1/1", "v4l2:///dev/video0", str(tmp_path / "real.mp4")):
        assert "6 questions, not real pictures; name" in said(real)
        assert "not real pictures and 'Fire?'; name" in said(real, "Fire?")
        assert said(real, "Fire?", model={"name": "tiny-qwen2_5_vl"}) == ""
        assert said(real, "Fire?", engine="simulated", simulated={"costs": "demo-cpu"}) == ""
    for unfit in ("/", ".", f"{'a' * 300}.mp4", f"/{'a' * 4000}/gate.mp4"):
        assert "not real pictures; name" in said(unfit), "every camera's status would fail with that of one"
