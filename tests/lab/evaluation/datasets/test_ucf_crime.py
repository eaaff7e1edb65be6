"""A directory laid out as UCF-Crime is published, with real videos, whole and broken."""

import pytest

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets import Skipped, dataset_layouts, load_dataset
from cluster.lab.evaluation.datasets.ucf_crime import ANOMALY_CLASSES, parse_class, prompt, read_annotations, read_split


def load(directory, **settings):
    return load_dataset(directory, "ucf-crime", **settings)


def by_name(dataset):
    return {video.name: video for video in dataset.videos}


def skipped(dataset):
    return {each.path.name: each.reason for each in dataset.skipped}


def test_the_official_test_split(ucf):
    dataset = load(ucf, min_seconds=8)
    assert [video.name for video in dataset.videos] == [
        "Abuse/Abuse028_x264",
        "Fighting/Fighting003_x264",
        "Fighting/Fighting047_x264",
        "Normal/Normal_Videos_003_x264",
        "Normal/Normal_Videos_006_x264",
    ]
    assert all(video.path.is_file() for video in dataset.videos)
    assert list(dataset.questions) == list(ANOMALY_CLASSES)


def test_frames_become_seconds_of_the_file(ucf):
    videos = by_name(load(ucf))
    assert videos["Abuse/Abuse028_x264"].events == (("Abuse", 5.5, 8.0),)
    assert videos["Fighting/Fighting003_x264"].events == (("Fighting", 1.0, 3.0), ("Fighting", 5.0, 7.0))
    kind, start_s, end_s = videos["Fighting/Fighting047_x264"].events[0]
    assert (kind, start_s) == ("Fighting", pytest.approx(200 / 30))
    assert end_s == pytest.approx(10, abs=0.05), "cut at the end of the video"


def test_frame_rates_other_than_the_datasets_count_as_they_are(ucf, write_video):
    write_video(ucf / "Anomaly-Videos-Part-1" / "Abuse" / "Abuse028_x264.mp4", 20, fps=15)
    assert by_name(load(ucf))["Abuse/Abuse028_x264"].events == (("Abuse", 11.0, 16.0),)


def test_a_video_is_judged_on_what_its_label_says(ucf):
    videos = by_name(load(ucf))
    assert videos["Fighting/Fighting003_x264"].kinds == ("Fighting",)
    assert videos["Normal/Normal_Videos_003_x264"].kinds == tuple(ANOMALY_CLASSES)
    assert videos["Normal/Normal_Videos_003_x264"].events == ()


def test_training_videos_are_counted_and_left_out(ucf):
    dataset = load(ucf)
    assert "Fighting/Fighting002_x264" not in by_name(dataset)
    assert skipped(dataset) == {"Anomaly_Test.txt": "1 more videos on disk are not in the test split"}


def test_without_the_split_the_annotation_says_what_is_tested(ucf, split_file):
    split_file.unlink()
    dataset = load(ucf)
    assert len(dataset.videos) == 5
    assert not dataset.skipped


def test_bad_videos_are_skipped_with_their_reasons(ucf, put, write_video):
    part = ucf / "Anomaly-Videos-Part-2" / "Fighting"
    (part / "Fighting047_x264.mp4").write_bytes(b"")
    put("Testing_Normal_Videos_Anomaly/Normal_Videos_003_x264.mp4", 2)
    (ucf / "Testing_Normal_Videos_Anomaly" / "Normal_Videos_006_x264.mp4").write_bytes(b"no video at all" * 100)
    cut = write_video(part / "Fighting003_x264.mp4", 10, faststart=True)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    dataset = load(ucf, min_seconds=8)
    assert [video.name for video in dataset.videos] == ["Abuse/Abuse028_x264"]
    why = skipped(dataset)
    assert why["Fighting047_x264.mp4"] == "empty file (0 bytes)"
    assert why["Normal_Videos_003_x264.mp4"] == "shorter than a window: 2.0 of 8 s"
    assert why["Normal_Videos_006_x264.mp4"].startswith("cannot be read: ")
    assert why["Fighting003_x264.mp4"].startswith("truncated: ends after ")


def test_unknown_classes_and_videos_that_are_not_there(ucf, put, split_file, annotation_file):
    put("Kidnapping/Kidnapping001_x264.mp4")
    split_file.write_text(split_file.read_text() + "Kidnapping/Kidnapping001_x264.mp4\nArson/Arson011_x264.mp4\n")
    annotation_file.write_text(annotation_file.read_text() + "Kidnapping001_x264.mp4  Kidnapping  1  2  -1  -1\n")
    dataset = load(ucf)
    assert len(dataset.videos) == 5
    why = skipped(dataset)
    lines = [each.reason for each in dataset.skipped if each.path == split_file]
    assert lines[0] == "line 6: unknown class 'Kidnapping' ('Kidnapping/Kidnapping001_x264.mp4')"
    assert why["Kidnapping001_x264.mp4"].startswith("unknown class 'Kidnapping'; there are Abuse, Arrest,")
    assert why["Arson011_x264.mp4"] == "in the test split, not on disk"
    assert why[annotation_file.name].startswith("line 6: unknown class 'Kidnapping'")


def test_a_video_without_annotation_is_skipped(ucf, annotation_file):
    annotation_file.write_text("Abuse028_x264.mp4  Abuse  165  240  -1  -1\n")
    dataset = load(ucf)
    assert skipped(dataset)["Fighting003_x264.mp4"] == f"has no event in {annotation_file.name}"
    assert {video.name.split("/")[0] for video in dataset.videos} == {"Abuse", "Normal"}


def test_events_behind_the_end(ucf, annotation_file):
    annotation_file.write_text(annotation_file.read_text().replace("165  240", "1650  2400"))
    assert skipped(load(ucf))["Abuse028_x264.mp4"].startswith("all its events are after its end at 10.")


def test_a_missing_annotation_file_leaves_nothing_to_measure(ucf, annotation_file):
    annotation_file.unlink()
    with pytest.raises(ConfigError, match=r"no video with an event is left .*Temporal_Anomaly.*: missing"):
        load(ucf)


def test_all_too_short(ucf):
    with pytest.raises(ConfigError, match=r"shorter than a window: 10\.0 of 60 s"):
        load(ucf, min_seconds=60)


def test_not_this_layout(tmp_path):
    with pytest.raises(ConfigError, match=r"not in UCF-Crime's layout: it holds neither Anomaly_Test\.txt nor Temp"):
        load(tmp_path)


def test_no_such_directory_or_layout(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        load(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"unknown dataset layout 'ucf_crime'; did you mean 'ucf-crime'\?"):
        load_dataset(tmp_path, "ucf_crime")
    assert "ucf-crime" in dataset_layouts


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Abuse028_x264.mp4 Abuse", "not a file, a class and pairs of frame numbers"),
        ("Abuse028_x264.mp4 Abuse 165 240 -1", "not a file, a class and pairs of frame numbers"),
        ("Abuse028_x264.mp4 Abuse 165 x -1 -1", "frame numbers are not whole numbers"),
        ("Abuse028_x264.mp4 Abuse 240 165 -1 -1", "an event from frame 240 to frame 165"),
        ("Abuse028_x264.mp4 Abuse 165 -1 -1 -1", "an event from frame 165 to frame -1"),
        ("Abuse028_x264.mp4 Abduction 165 240 -1 -1", "unknown class 'Abduction'"),
    ],
)
def test_a_bad_annotation_line_is_named_and_the_others_stand(tmp_path, line, reason):
    path = tmp_path / "annotation.txt"
    path.write_text(f"\n{line}\nArson011_x264.mp4  Arson  150  420  680  1267\n")
    bad = Skipped()
    found = read_annotations(path, bad)
    assert {key.file: spans for key, spans in found.items()} == {"Arson011_x264.mp4": ((150, 420), (680, 1267))}
    assert [each.reason for each in bad] == [f"line 2: {reason} ({line!r})"]


def test_a_split_line_without_a_class(tmp_path):
    path = tmp_path / "split.txt"
    path.write_text("Abuse028_x264.mp4\nRoadAccidents/RoadAccidents001_x264.mp4\n")
    bad = Skipped()
    found = read_split(path, bad)
    assert found == [("RoadAccidents", "RoadAccidents001_x264.mp4")]
    assert bad[0].reason == "line 1: names no class ('Abuse028_x264.mp4')"


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("RoadAccidents", "RoadAccidents"),
        ("road_accidents", "RoadAccidents"),
        ("Training_Normal_Videos_Anomaly", "Normal"),
        ("Training-Normal-Videos-Part-2", "Normal"),
        ("z_Normal_Videos_event", "Normal"),
        ("Normal", "Normal"),
        ("Anomaly-Videos-Part-1", None),
        ("", None),
    ],
)
def test_class_folders(folder, expected):
    assert parse_class(folder) == expected


def test_the_papers_prompt():
    assert prompt("Abuse") == (
        "Describe the frames and determine if they show any abuse. Start your response with ‘Yes’ or ‘No’"
    )
    assert len({prompt(kind) for kind in ANOMALY_CLASSES}) == len(ANOMALY_CLASSES) == 13
