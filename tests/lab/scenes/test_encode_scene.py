"""What comes out of the encoder is what the camera settings say, and what was drawn."""

import av
import numpy as np
import pytest
from av.video.frame import PictureType

from cluster.codec import FileSource
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.lab.scenes.encode import encode_scene, partial_path
from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.types import PatchGeometry

CAMERAS = {
    "h264": {"codec": "h264", "gop_s": 2.0, "bframes": 0},
    "h264-b": {"codec": "h264", "gop_s": 4.0, "bframes": 2},
    "hevc": {"codec": "hevc", "gop_s": 2.0, "bframes": 0},
    "hevc-b": {"codec": "hevc", "gop_s": 4.0, "bframes": 2},
}


def frames(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        decoded = [(PictureType(each.pict_type).name, each.to_ndarray(format="rgb24")) for each in container.decode(0)]
        return stream.codec_context.name, float(stream.average_rate), decoded


@pytest.mark.parametrize("camera", CAMERAS)
def test_the_camera_gets_its_codec_gop_and_b_frames(camera, small_scene, tmp_path):
    wanted = CAMERAS[camera]
    scene = small_scene(event="fight", fps=5.0, **wanted)
    path = tmp_path / "clip.mp4"
    encode_scene(scene, path)
    codec, fps, decoded = frames(path)
    types = "".join(kind for kind, _ in decoded)
    gop = round(wanted["gop_s"] * 5)
    assert (codec, fps, len(decoded)) == (wanted["codec"], 5.0, 120)
    assert [at for at, kind in enumerate(types) if kind == "I"] == list(range(0, 120, gop)), "a fixed GOP, no more cuts"
    longest = max(map(len, types.replace("I", "P").split("P")))
    assert longest == wanted["bframes"]
    assert decoded[0][1].shape == (108, 192, 3)


@pytest.mark.parametrize("camera", CAMERAS)
def test_the_same_scene_gives_the_same_bytes_and_another_does_not(camera, small_scene, tmp_path):
    one, two, other = (tmp_path / f"{name}.mp4" for name in ("one", "two", "other"))
    scene = small_scene(index=5, **CAMERAS[camera])
    assert encode_scene(scene, one) == encode_scene(scene, two)
    encode_scene(small_scene(index=6, **CAMERAS[camera]), other)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()
    assert truth_path(one).read_bytes() == truth_path(two).read_bytes()


def test_the_decoded_pictures_are_those_drawn_at_their_times(fall):
    scene, path, _ = fall
    renderer = SceneRenderer(scene, 192, 108)
    decoded = frames(path)[2]
    for number in (0, 37, 119):
        drawn = renderer.picture(number / 5.0, number).astype(float)
        error = np.abs(decoded[number][1].astype(float) - drawn).mean()
        assert error < 12
        # Nearer to its own picture than to one of another time, or the clock would be off unseen.
        far = renderer.picture((number + 60) % 120 / 5.0, (number + 60) % 120).astype(float)
        assert error < np.abs(decoded[number][1].astype(float) - far).mean()


def test_fewer_bits_at_a_worse_quality(small_scene, tmp_path):
    sizes = []
    for crf in (22, 32):
        encode_scene(small_scene(index=2, codec="h264", crf=crf), tmp_path / f"{crf}.mp4")
        sizes.append((tmp_path / f"{crf}.mp4").stat().st_size)
    assert sizes[0] > 1.5 * sizes[1]


def test_an_interrupted_encoding_leaves_nothing(small_scene, tmp_path, monkeypatch):
    """Ctrl-C in the middle of a clip."""
    draw = SceneRenderer.picture

    def interrupted(self, second, number):
        if number == 50:
            raise KeyboardInterrupt
        return draw(self, second, number)

    monkeypatch.setattr(SceneRenderer, "picture", interrupted)
    path = tmp_path / "clip.mp4"
    with pytest.raises(KeyboardInterrupt):
        encode_scene(small_scene(), path)
    assert list(tmp_path.iterdir()) == []
    assert partial_path(path).parent == tmp_path


def test_a_folder_that_is_not_there(small_scene, tmp_path):
    with pytest.raises(OSError, match="No such file"):
        encode_scene(small_scene(), tmp_path / "nowhere" / "clip.mp4")


def test_the_truth_lies_beside_the_clip(fall):
    _, path, truth = fall
    assert SceneTruth.load(truth_path(path)) == truth


@pytest.mark.parametrize("camera", CAMERAS)
def test_the_live_front_end_decodes_every_picture_and_distrusts_none(camera, small_scene, tmp_path):
    path = tmp_path / "clip.mp4"
    encode_scene(small_scene(index=4, **CAMERAS[camera]), path)
    source = FileSource(path)
    processor = CodecProcessor(PatchGeometry(14, 2, 2), CodecOptions(fps=2.0, anchor_interval_s=8.0))
    processor.open(source.open())
    samples = [sample for packet in source.packets() for sample in processor.feed(packet)] + processor.drain()
    stats = processor.stats
    assert stats.frames_decoded == 120
    assert (stats.decode_errors, stats.gaps, dict(stats.resyncs)) == (0, 0, {})
    assert len(samples) == 48
    assert stats.cue == ("luma" if CAMERAS[camera]["codec"] == "hevc" else "vectors+luma")
    assert samples[0].fresh
    assert sum(sample.anchor for sample in samples) == 3, "one every 8 s"
