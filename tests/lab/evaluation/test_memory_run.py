"""Recording a clip once, asking memories of it under many settings, and what is said of the whole."""

import json
from dataclasses import replace

import pytest
import torch

from cluster.codec.file import FileSource
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SightlineError
from cluster.files import json_text
from cluster.lab.evaluation.memory.answer import answer_scene, filled_memory, full_bytes, load_head_tokens
from cluster.lab.evaluation.memory.questions import Footage, Question, multiple_choice
from cluster.lab.evaluation.memory.recording import Recording, record
from cluster.lab.evaluation.memory.report import chance, make_report
from cluster.lab.evaluation.memory.results import GradedAnswer
from cluster.lab.evaluation.memory.run import evaluate_memory
from cluster.lab.evaluation.memory.settings import FULL, SHARES, ShareSetting, memory_grid, ours
from cluster.lab.evaluation.settings import WindowShape
from cluster.lab.evaluation.work import ModelSpec
from cluster.lab.scenes.street_clips import make_clip
from cluster.memory.bank import MemoryBank
from cluster.memory.compress.attention import SnapKV
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.registry import compressors, organisers, retrievers
from cluster.types import MICROSECONDS, AskSpec, MemorySpec, StreamSpec
from cluster.types import Question as StandingQuestion
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

SHAPE = WindowShape(window_s=6, stride_s=2, fps=2, anchor_interval_s=4)
SECONDS = 20
QUESTIONS = (
    Question("needle", ("Did a car pass?",), ("yes",), 9.0, None, ((2.0, 4.0),)),
    Question("counting", ("How many people?",), ("two",), 20.0, 8.0),
    Question("multi-turn", ("Is there a car?", "Did it stop?"), ("yes", "no"), 20.0),
    multiple_choice("plot", "What is there?", ("a car", "a dog"), 0, 20.0),
)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("past") / "street.mp4"
    make_clip("street", path, seconds=SECONDS, fps=10, size=(224, 128))
    return path


@pytest.fixture(scope="module")
def samples(clip, tiny_engine):
    """What the engine is sent, as an agent sends it."""
    source, sampler = FileSource(clip), PatchSampler("cam", make_pruner("replenish", {}), SHAPE.fps)
    processor = CodecProcessor(tiny_engine.geometry, CodecOptions(fps=2.0, anchor_interval_s=4.0))
    processor.open(source.open())
    frames = [frame for packet in source.packets() for frame in processor.feed(packet)]
    found = [sampler.feed(frame) for frame in [*frames, *processor.drain()]]
    source.close()
    return [sample for sample in [*found, sampler.flush()] if sample is not None]


@pytest.fixture(scope="module")
def recording(clip, tiny_engine):
    return record(tiny_engine.model, clip, SHAPE, [20.0, 9.0, 9.0])


@pytest.fixture(scope="module")
def asking(tiny_engine):
    """An engine whose memories these tests may replace."""
    return NativeEngine(tiny_engine.model)


# -- recording ------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [0, 1])
def test_at_an_instant_all_frames_that_ended_before_it_are_known_and_none_after(recording, samples, number):
    at_s = (9.0, 20.0)[number]
    begin = samples[0].pts
    assert recording.instants[number].at_s == at_s
    wanted = [
        sample.pts
        for sample in samples
        if sample.tokens and sample.pts + sample.duration <= begin + at_s * MICROSECONDS
    ]
    seen = recording.seen(number)
    assert [chunk.pts for chunk in seen] == wanted
    assert recording.instants[number].window
    # All layers of each token, and no two frames share memory with different content.
    assert sum(chunk.tokens for chunk in seen) >= sum(s.tokens for s in samples if s.pts in wanted)


def test_compressors_are_shown_the_rows_that_the_live_system_shows_them(recording, samples, tiny_engine, monkeypatch):
    live = NativeEngine(tiny_engine.model, memories=MemoryBank(TierStack([Arena(64 * 2**20)])))
    standing = StandingQuestion("q", "Is anyone there?")
    live.admit(StreamSpec("cam", (standing,), 6.0, 2.0, static_gate=False, memory=MemorySpec("snapkv"), patient=True))
    observe, shown = SnapKV.observe, []
    monkeypatch.setattr(SnapKV, "observe", lambda self, rows: shown.append([*rows]) or observe(self, rows))
    for sample in samples:
        for request in live.push(replace(sample, stream="cam")):
            live.step([request])
    for request in live.flush("cam"):
        live.step([request])
    recorded = recording.instants[1].queries
    for rows, wanted in zip(recorded, shown[-1], strict=True):
        torch.testing.assert_close(rows, wanted, rtol=1e-3, atol=1e-4)
    shown.clear()
    filled_memory(recording.seen(1), ShareSetting("snapkv", "resv", "wicsum", share=1 / 4), recorded)
    assert any(rows and torch.equal(torch.stack(rows), torch.stack(recorded)) for rows in shown)


def test_a_recording_comes_back_as_it_was_saved_and_a_broken_one_not_at_all(recording, tmp_path):
    path = tmp_path / "deep" / "r.pt"
    recording.save(path)
    again = Recording.load(path)
    assert (again.begin, again.frame_s) == (recording.begin, recording.frame_s)
    for number in (0, 1):
        rows = recording.instants[number].queries, again.instants[number].queries
        assert rows[0]
        assert all(torch.equal(*each) for each in zip(*rows, strict=True))
        for ours_, theirs in zip(recording.seen(number), again.seen(number), strict=True):
            assert (ours_.index, ours_.pts, ours_.rows, ours_.columns) == (
                theirs.index,
                theirs.pts,
                theirs.rows,
                theirs.columns,
            )
            for name in ("key", "value", "cell", "mean_embedding"):
                assert torch.equal(getattr(ours_, name), getattr(theirs, name))
    path.write_bytes(path.read_bytes()[:1000])
    assert Recording.load(path) is None
    assert Recording.load(tmp_path / "none") is None


def test_a_recording_that_cannot_be_written_says_so(recording, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SightlineError, match="cannot write the recording"):
        recording.save(tmp_path / "file" / "r.pt")


# -- answering ------------------------------------------------------------------------------------
def test_full_kv_answers_as_the_live_system_that_forgets_nothing(recording, samples, asking, tiny_engine):
    bank = MemoryBank(TierStack([Arena(512 * 2**20)]))
    live = NativeEngine(tiny_engine.model, memories=bank)
    memory = MemorySpec("none", "frames", "top_k", cap_bytes=256 * 2**20, retriever_options={"share": 1.0})
    spec = StreamSpec("cam", (StandingQuestion("q", "Who?"),), 6.0, 2.0, static_gate=False, memory=memory)
    live.admit(spec)
    for sample in samples:
        for request in live.push(replace(sample, stream="cam")):
            live.step([request])
    for request in live.flush("cam"):
        live.step([request])
    live.evict("cam")

    def say(text, turns=(), since_s=None):
        run = live.ask(AskSpec("cam", text, turns=turns, since_s=since_s, max_new_tokens=8))
        while run.step() is not None:
            pass
        return run.result.text

    run = answer_scene(asking, recording, "clip", QUESTIONS, FULL)
    assert run.incomplete == 0
    first = say("Is there a car?")
    assert run.answered[2].said == (first, say("Did it stop?", (("Is there a car?", first),)))
    newest = (recording.seen(1)[-1].pts - recording.begin) / MICROSECONDS
    assert run.answered[1].said == (say("How many people?", since_s=newest - 8.0),)
    assert run.answered[3].said == (say(QUESTIONS[3].turns[0]),)


def test_full_kv_reads_what_was_seen_since_and_says_how_much_of_it_is_evidence(recording, asking):
    needle, counting, *_ = answer_scene(asking, recording, "clip", QUESTIONS, FULL).answered
    seen = recording.seen(0)
    assert needle.held == needle.retrieved == sum(chunk.tokens for chunk in seen)
    middles = [
        (chunk.pts - recording.begin) / MICROSECONDS + recording.frame_s / 2
        for chunk in seen
        for _ in range(chunk.tokens)
    ]
    inside = sum(2.0 <= middle <= 4.0 for middle in middles)
    assert needle.recall.inside == pytest.approx(inside / len(middles))
    assert needle.recall.found
    assert needle.history_s == 9.0
    since = [chunk for chunk in recording.seen(1) if chunk.pts - recording.begin >= 8 * MICROSECONDS]
    assert 0 < counting.retrieved == sum(chunk.tokens for chunk in since) < counting.held
    assert counting.recall is None


@pytest.mark.parametrize("compressor", [name for name in compressors.names() if name != "none"])
def test_what_is_held_stays_under_the_share_at_every_instant(recording, asking, compressor):
    held = []
    for share, questions in ((0.9, QUESTIONS[:1]), (0.5, QUESTIONS[:2])):
        run = answer_scene(
            asking, recording, "clip", questions, ShareSetting(compressor, "resv", "wicsum", share=share)
        )
        for number, each in enumerate(run.answered):
            assert 0 < each.bytes_held <= share * full_bytes(recording.seen(number))
            assert each.retrieved <= each.held
        assert run.incomplete == 0
        held.append(run.answered[0].held)
    assert held[0] > held[1] > 0


def test_the_tokens_of_a_head_are_those_that_its_clusters_name(recording, asking):
    chunks = recording.seen(1)
    number = torch.cat([torch.full((chunk.tokens,), n) for n, chunk in enumerate(chunks)])
    cell = torch.cat([chunk.cell for chunk in chunks])
    for setting in (FULL, ShareSetting("sliding", "resv", "wicsum", share=0.6)):
        asking.memories, memory = filled_memory(chunks, setting)
        for layer, heads in enumerate(memory.heads):
            for h, head in enumerate(heads):
                there = set(zip(head.frame.tolist(), head.cell.tolist(), strict=True))
                kept = torch.tensor([(f, c) in there for f, c in zip(number.tolist(), cell.tolist(), strict=True)])
                assert len(kept) == kept.sum() if setting == FULL else 0 < kept.sum() < len(kept)
                held = load_head_tokens(memory, layer, h)
                # Within a frame in the order of the clusters.
                order = (held.frame[0] * 2**20 + held.cell[0]).argsort()
                assert torch.equal(held.frame[0, order], number[kept])
                assert torch.equal(held.cell[0, order], cell[kept])
                key = torch.cat([chunk.key[layer, h] for chunk in chunks])[kept]
                assert torch.allclose(held.key[0, order].float(), key.float(), atol=0.1)


@pytest.mark.parametrize("organiser", organisers.names())
def test_a_memory_without_a_bound_holds_every_token_however_it_is_organised(recording, asking, organiser):
    run = answer_scene(asking, recording, "clip", QUESTIONS, ShareSetting("none", organiser, "top_k"))
    assert run.incomplete == 0
    for question, each in zip(QUESTIONS, run.answered, strict=True):
        assert each.held == sum(chunk.tokens for chunk in recording.seen(0 if question.at_s == 9.0 else 1))


def test_a_share_too_small_for_a_token_is_told(recording, asking):
    run = answer_scene(asking, recording, "clip", QUESTIONS, ShareSetting("sliding", "frames", "top_k", share=1e-6))
    assert run.incomplete == len(QUESTIONS)
    assert all(each.bytes_held == each.retrieved == 0 for each in run.answered)


def test_who_is_asked_before_anything_was_seen_says_nothing(clip, tiny_engine, asking):
    questions = [replace(QUESTIONS[0], at_s=0.2), replace(QUESTIONS[2], at_s=0.2), replace(QUESTIONS[0], at_s=4.0)]
    run = answer_scene(asking, record(tiny_engine.model, clip, SHAPE, [0.2, 4.0]), "clip", questions, FULL)
    assert [each.said for each in run.answered[:2]] == [("",), ("", "")]
    assert [each.held for each in run.answered[:2]] == [0, 0]
    assert run.answered[2].held > 0


def test_questions_at_an_instant_that_was_not_recorded_are_refused(recording, asking):
    with pytest.raises(ValueError, match="lacks the question instant 5 s"):
        answer_scene(asking, recording, "clip", [replace(QUESTIONS[0], at_s=5.0)], FULL)


# -- settings -------------------------------------------------------------------------------------
def test_quick_settings_hold_each_policy_once_at_an_eighth_and_ours_at_every_share():
    assert memory_grid("basic") == [FULL, ours(1.0), *map(ours, SHARES)]
    quick = memory_grid("quick")
    assert quick[0] == FULL
    assert FULL.name == "full"
    assert {ours(share) for share in (1.0, *SHARES)} <= set(quick)
    eighth = [setting for setting in quick if setting.share == 1 / 8]
    assert {setting.compressor for setting in eighth} == set(compressors.names()) - {"none"}
    assert {setting.organiser for setting in eighth} == set(organisers.names())
    assert ours(1 / 8).name == "{0.compressor}/{0.organiser}/{0.retriever}@1/8".format(MemorySpec())


def test_standard_settings_are_the_whole_product():
    ways = len(organisers.names()) * len(retrievers.names())
    bounded = [setting for setting in memory_grid("standard") if setting.share < 1]
    assert len(bounded) == len(SHARES) * (len(compressors.names()) - 1) * ways
    assert sum(setting.compressor == "none" and not setting.everything for setting in memory_grid("standard")) == ways
    with pytest.raises(ConfigError, match="unknown settings 'slow'; there are: basic, quick, standard"):
        memory_grid("slow")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"share": 0.0}, "above 0"),
        ({"compressor": "zip"}, "unknown compressor 'zip'"),
        ({"retriever": "wicsum", "everything": True}, "top_k"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong, reason):
    with pytest.raises(ConfigError, match=reason):
        ShareSetting(**{"compressor": "none", "organiser": "frames", "retriever": "top_k", **wrong})


# -- the whole ------------------------------------------------------------------------------------
SOME = [FULL, ours(1 / 8)]


def evaluated(footage, model, folder, **options):
    told = []
    found = evaluate_memory(footage, model, SOME, SHAPE, folder, on_progress=lambda *at: told.append(at), **options)
    return found, told


def answers(found):
    return [[each.said for each in result.answered] for result in found.results]


def test_an_interrupted_evaluation_goes_on_where_it_was(clip, tiny_engine, tmp_path):
    footage = [Footage("street", clip, QUESTIONS)]
    found, told = evaluated(footage, tiny_engine.model, tmp_path)
    assert [at[:2] for at in told] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    work = tmp_path / "work.jsonl"
    lines = work.read_text().splitlines()
    assert len(lines) == 2
    again, told = evaluated(footage, tiny_engine.model, tmp_path)
    assert [at[:2] for at in told] == [(2, 2)]
    assert again.results == found.results
    # One answer broke off and the recording is lost: both are made again, the other answer is not.
    work.write_text(f"{lines[1]}\n{lines[0][:50]}")
    next((tmp_path / "recordings").iterdir()).unlink()
    again, told = evaluated(footage, tiny_engine.model, tmp_path)
    assert told[-1][:2] == (3, 3)
    assert answers(again) == answers(found)
    assert told[0][0] == 1
    assert work.read_text().splitlines().count(lines[1]) == 1
    other = [replace(footage[0], questions=(replace(QUESTIONS[0], turns=("Did a bus pass?",)), *QUESTIONS[1:]))]
    assert evaluated(other, tiny_engine.model, tmp_path)[1][0][0] == 0


def test_answers_do_not_depend_on_processes_and_unreadable_clips_are_left_out(clip, tiny_engine, tmp_path):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    footage = [
        Footage("street", clip, QUESTIONS[:2]),
        Footage("broken", broken, QUESTIONS[:1]),
        Footage("gone", tmp_path / "gone.mp4", QUESTIONS[:1]),
    ]
    alone, _ = evaluated(footage, tiny_engine.model, tmp_path / "alone")
    several, told = evaluated(footage, ModelSpec("tiny-qwen2_5_vl"), tmp_path / "several", jobs=2)
    assert answers(several) == answers(alone)
    assert told[-1][0] == told[-1][1]
    assert {each.path.name for each in several.skipped} == {"broken.mp4", "gone.mp4"}
    assert [each.name for each in several.footage] == ["street"]
    with pytest.raises(SightlineError, match="all 1 clips were skipped; the first, broken"):
        evaluated(footage[1:2], tiny_engine.model, tmp_path / "none")


def test_what_cannot_be_evaluated_is_refused(clip, tiny_engine, tmp_path):
    footage = Footage("street", clip, QUESTIONS)
    for wrong in ([], [replace(footage, questions=())]):
        with pytest.raises(ConfigError, match="at least one clip"):
            evaluated(wrong, tiny_engine.model, tmp_path)
    with pytest.raises(ConfigError, match="names of settings and clips must be unique"):
        evaluated([footage, footage], tiny_engine.model, tmp_path)
    with pytest.raises(ConfigError, match="give a ModelSpec"):
        evaluated([footage], tiny_engine.model, tmp_path, jobs=2)


# -- the summary ----------------------------------------------------------------------------------
def test_chance_is_what_the_commonest_answer_of_each_kind_gets():
    def needle(answer):
        return Question("needle", ("?",), (answer,), 1.0)

    # Two of three needles, half of one conversation's and both of the other's turns, one of two choices.
    questions = [
        *map(needle, ("yes", "yes", "no")),
        Question("multi-turn", ("?", "?"), ("no", "yes"), 1.0),
        Question("multi-turn", ("?", "?"), ("no", "no"), 1.0),
        multiple_choice("plot", "?", ("a", "b"), 1, 1.0),
        multiple_choice("plot", "?", ("a", "b"), 0, 1.0),
    ]
    assert chance(questions) == pytest.approx((2 + 1.5 + 1) / 7)


def test_the_summary_has_the_headline_and_says_that_a_model_at_chance_shows_nothing(clip, tiny_engine, tmp_path):
    found, _ = evaluated([Footage("street", clip, QUESTIONS)], tiny_engine.model, tmp_path)
    report = make_report("Memory", found, tiny_engine.model, facts={"model": "tiny"})
    body = json.loads(json_text(report.as_json()))
    full, eighth = (result.accuracy["all"].value for result in found.results)
    assert body["figures"]["accuracy_full"] == full
    assert body["figures"]["accuracy_drop_at_eighth"] == pytest.approx(full - eighth)
    assert body["figures"]["chance"] == 1.0
    assert any("not clearly above chance" in note for note in body["notes"])
    assert any("no open_instruction" in note for note in body["notes"])
    # Every answer is judged as right as can be: now the same report has nothing to warn of.
    right = [
        replace(result, answered=tuple(replace(a, judged=replace(a.judged, credit=1.0)) for a in result.answered))
        for result in found.results
    ]
    questions = tuple(replace(QUESTIONS[0], answers=(answer,)) for answer in ("yes", "no", "maybe", "never"))
    sure = replace(found, results=tuple(right), footage=(replace(found.footage[0], questions=questions),))
    assert not any("not clearly above chance" in note for note in make_report("Memory", sure, tiny_engine.model).notes)


def test_the_drop_is_of_the_kinds_of_questions_that_full_kv_answers_above_chance(clip, tiny_engine, tmp_path):
    found, _ = evaluated([Footage("street", clip, QUESTIONS)], tiny_engine.model, tmp_path)
    # Kind, right answer, credit with full KV and with ours; always saying "yes" is worth 0.5 of either kind.
    told = [("easy", "yes", 1, 1), ("easy", "no", 1, 0), ("hard", "yes", 1, 0), ("hard", "no", 0, 1)]
    questions = tuple(Question(kind, ("?",), (answer,), 1.0) for kind, answer, _, _ in told)
    results = []
    for result, column in zip(found.results, (2, 3), strict=True):
        answered = [
            replace(result.answered[0], judged=GradedAnswer("street", number, row[0], float(row[column])))
            for number, row in enumerate(told)
        ]
        results.append(replace(result, answered=tuple(answered)))
    made = replace(found, results=tuple(results), footage=(replace(found.footage[0], questions=questions),))
    report = make_report("Memory", made, tiny_engine.model)
    assert "full KV is clearly above chance on easy; the drop is over these kinds" in report.notes
    wanted = {
        "chance": 0.5,
        "accuracy_full": 0.75,
        "chance_answered": 0.5,
        "accuracy_full_answered": 1.0,
        "accuracy_drop_at_eighth": 0.5,
    }
    assert {name: report.headline[name] for name in wanted} == wanted
