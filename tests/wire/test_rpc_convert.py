"""Every border type comes back from the wire as it went; what is malformed is refused with one sentence."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sightline.v1 import cameras_pb2, frames_pb2, ingest_pb2, pictures_pb2, results_pb2

from cluster.types import (
    Answer,
    CameraStatus,
    EncodedPacket,
    FrameSample,
    LastAnswer,
    PatchGrid,
    Question,
    StreamSpec,
    Timing,
    TokenCount,
)
from cluster.types.cameras import DiscoveredCamera, DiscoveredStream, Discovery
from cluster.wire import convert
from cluster.wire.mapping import from_message, to_message

prop = settings(deadline=None, max_examples=50)
int64 = st.integers(-(2**63), 2**63 - 1)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
unit = st.floats(0, 1)
seconds = st.floats(0, 1e9)


@prop
@given(
    st.builds(
        EncodedPacket,
        codec=st.just("hevc"),
        data=st.binary(max_size=200),
        pts=st.none() | int64,
        dts=st.none() | int64,
        keyframe=st.booleans(),
        sequence=uint64,
    )
)
def test_packet(packet):
    wire = convert.packet_to_proto(packet).SerializeToString()
    assert convert.packet_from_proto(ingest_pb2.Packet.FromString(wire), "hevc") == packet


@st.composite
def samples(draw):
    merge = draw(st.integers(1, 3))
    grid = PatchGrid(
        rows=merge * draw(st.integers(1, 5)),
        cols=merge * draw(st.integers(1, 5)),
        patch=draw(st.integers(1, 6)),
        merge=merge,
        temporal=draw(st.integers(1, 3)),
    )
    cells = grid.group_rows * grid.group_cols
    groups = np.array(draw(st.lists(st.booleans(), min_size=cells, max_size=cells)))
    mask = np.kron(groups.reshape(grid.group_rows, grid.group_cols), np.ones((merge, merge))).astype(bool)
    shape = (int(mask.sum()), grid.temporal, 3, grid.patch, grid.patch)
    patches = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, shape, dtype=np.uint8)
    return FrameSample(
        stream=draw(names),
        index=draw(uint64),
        pts=draw(int64),
        duration=draw(int64),
        anchor=draw(st.booleans()),
        fresh=draw(st.booleans()),
        grid=grid,
        mask=mask,
        patches=patches,
        activity=draw(unit),
        windows_dropped=draw(uint64),
        gap=draw(st.booleans()),
    )


@prop
@given(samples())
def test_frame(sample):
    wire = convert.frame_to_proto(sample).SerializeToString()
    back = convert.frame_from_proto(frames_pb2.Frame.FromString(wire))
    arrays = ("mask", "patches")
    for name in arrays:
        mine, other = getattr(sample, name), getattr(back, name)
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert np.array_equal(mine, other)
    scalars = [name for name in FrameSample.__slots__ if name not in arrays]
    assert [getattr(back, name) for name in scalars] == [getattr(sample, name) for name in scalars]


def change(message, path, value):
    *parents, last = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    setattr(message, last, value)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("mask", b"", "mask of 0 bytes, but 4x6 patches take 3"),
        ("mask", b"\xff" * 4, "mask of 4 bytes"),
        ("mask", b"\x80\0\0", "keeps part of a merge group; masks must keep whole groups of 2x2"),
        ("mask", b"\0\0\0", "its mask keeps 0 patches, which take 0"),
        ("patches", b"", "0 bytes of patches"),
        ("grid.merge", 0, "impossible patch grid"),
        ("grid.merge", 4, "merge groups of 4x4 do not tile"),
        ("grid.rows", 2**31, "impossible patch grid"),
        ("grid.patch", 2**20, "impossible patch grid"),
        ("grid.temporal", 3, "bytes of patches"),
    ],
)
def test_malformed_frame(make, path, value, sentence):
    message = convert.frame_to_proto(make.sample())
    change(message, path, value)
    with pytest.raises(ValueError, match=sentence):
        convert.frame_from_proto(message)


def test_mask_bits_beyond_the_grid(make):
    grid = PatchGrid(1, 3, 2, 1, 1)
    mask = np.ones((1, 3), bool)
    sample = FrameSample("gate", 0, 0, 1, True, True, grid, mask, np.zeros((3, 1, 3, 2, 2), np.uint8), 0.0)
    message = convert.frame_to_proto(sample)
    message.mask = b"\xff"
    with pytest.raises(ValueError, match="beyond its grid"):
        convert.frame_from_proto(message)


@prop
@given(
    st.builds(
        Answer,
        stream=names,
        window=uint64,
        start=int64,
        end=int64,
        question=names,
        score=unit,
        positive=st.booleans(),
        text=text,
        gated=st.booleans(),
        tokens=st.builds(TokenCount, *[uint32] * 7),
        timing=st.builds(Timing, *[seconds] * 5),
    ),
    uint64,
)
def test_answer(answer, missed):
    wire = results_pb2.Answer.FromString(convert.answer_to_proto(answer, missed).SerializeToString())
    assert convert.answer_from_proto(wire) == answer
    assert wire.missed == missed


questions = st.builds(Question, id=names, text=names, threshold=st.floats(0.01, 1), explain=st.booleans())


@prop
@given(
    st.builds(
        StreamSpec,
        stream=names,
        questions=st.lists(questions, max_size=3).map(tuple),
        window_s=seconds,
        stride_s=seconds,
        refresh=names,
        refresh_budget=st.none() | unit,
        static_gate=st.booleans(),
        max_idle_s=seconds,
    )
)
def test_spec(spec):
    assert convert.spec_from_json(convert.spec_to_json(spec)) == spec


def test_spec_defaults_may_be_left_out():
    assert convert.spec_from_json('{"stream": "gate", "questions": []}') == StreamSpec("gate", ())


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("{", "specification: Invalid JSON"),
        ("[]", "specification: Input should be an object"),
        ({"questions": []}, "stream: Field required"),
        ({"stream": "gate"}, "questions: Field required"),
        ({"stream": "gate", "questions": [], "window": 3}, "window: Unexpected keyword argument"),
        ({"stream": "gate", "questions": [], "window_s": "long"}, "window_s: Input should be a valid number"),
        ({"stream": "gate", "questions": [], "window_s": True}, "window_s: Input should be a valid number"),
        ({"stream": "gate", "questions": ["person"]}, "questions.0: Input should be an object"),
        ({"stream": "gate", "questions": [{"id": "a"}]}, "questions.0.text: Field required"),
        (
            {"stream": "gate", "questions": [{"id": "a", "text": "b", "colour": 1}]},
            "questions.0.colour: Unexpected keyword argument",
        ),
    ],
)
def test_malformed_spec(body, sentence):
    with pytest.raises(ValueError, match=sentence):
        convert.spec_from_json(body if isinstance(body, str) else json.dumps(body))


def test_not_a_number_is_not_sent(make):
    with pytest.raises(ValueError, match="JSON"):
        convert.spec_to_json(replace(make.spec(), window_s=math.nan))


@prop
@given(questions)
def test_question(question):
    wire = cameras_pb2.Question.FromString(to_message(cameras_pb2.Question, question).SerializeToString())
    assert convert.question_from_proto(wire) == question


def test_question_without_threshold_gets_the_default():
    assert convert.question_from_proto(cameras_pb2.Question(id="a", text="b")).threshold == 0.5


def test_question_with_an_impossible_threshold():
    with pytest.raises(ValueError, match=r"threshold of 1\.5"):
        convert.question_from_proto(cameras_pb2.Question(id="a", text="b", threshold=1.5))


found_cameras = st.builds(
    DiscoveredCamera,
    address=names,
    name=text,
    model=text,
    streams=st.lists(
        st.builds(DiscoveredStream, profile=text, codec=text, width=uint32, height=uint32, fps=seconds, source=text),
        max_size=2,
    ).map(tuple),
    error=text,
)


@prop
@given(st.builds(Discovery, *[uint32] * 4, st.none() | found_cameras))
def test_discovery(found):
    wire = to_message(pictures_pb2.DiscoverReply, found).SerializeToString()
    assert from_message(Discovery, pictures_pb2.DiscoverReply.FromString(wire)) == found


states = st.sampled_from(["waiting", "connecting", "running", "backoff", "error", "ended", "paused"])


@prop
@given(
    st.builds(
        CameraStatus,
        name=names,
        source=text,
        state=states,
        reason=text,
        retry_in_s=seconds,
        codec=text,
        width=uint32,
        height=uint32,
        cue=text,
        last_frame_age_s=seconds,
        decoder=text,
        replica=text,
        frames_decoded=uint64,
        frames_sampled=uint64,
        decode_errors=uint64,
        gaps=uint64,
        windows_done=uint64,
        windows_gated=uint64,
        windows_dropped=uint64,
        windows_lost=uint64,
        tokens_full=uint64,
        tokens_kept=uint64,
        tokens_computed=uint64,
        latency_s=seconds,
        memory_bytes=uint64,
        memory_frames=uint64,
        memory_oldest_s=seconds,
        memory_state=text,
        last_answers=st.lists(st.builds(LastAnswer, names, unit, st.booleans(), int64), max_size=3).map(tuple),
    )
)
def test_status(status):
    wire = cameras_pb2.CameraStatus.FromString(convert.status_to_proto(status).SerializeToString())
    assert convert.status_from_proto(wire) == status


def test_every_state_of_the_codec_layer_is_on_the_wire():
    from cluster.codec.source import CameraState

    for state in CameraState:
        status = CameraStatus("gate", state=state.value)
        assert convert.status_from_proto(convert.status_to_proto(status)).state == state


def test_every_field_of_a_status_is_on_the_wire():
    wire = set(cameras_pb2.CameraStatus.DESCRIPTOR.fields_by_name)
    assert wire == set(CameraStatus.__slots__)


def test_an_unspecified_state_reads_as_waiting():
    assert convert.status_from_proto(cameras_pb2.CameraStatus(name="gate")).state == "waiting"
