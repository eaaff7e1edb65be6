"""``models check``: right of checkpoints that are, and wrong, with the stage, of what was broken on purpose."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.cli import main
from cluster.engine.native.engine import NativeEngine
from cluster.engine.window.kv import StreamKV
from cluster.lab.check import clip as clips
from cluster.lab.check import run
from cluster.lab.check.clip import check_clip
from cluster.lab.check.logits import LogitPair
from cluster.lab.check.run import AskedWindow, run_check
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS
from cluster.models.settings import ModelSettings

FAMILIES = [name for name in PRESETS if name.startswith("tiny-")]


def not_json(constant):
    raise AssertionError(f"{constant} is not JSON")


def verdicts(report):
    return {stage.name: stage.verdict for stage in report.stages}


@pytest.fixture
def short(monkeypatch):
    """One window that slid and one that is compared."""
    monkeypatch.setattr(clips, "COMPARED", 1)
    monkeypatch.setattr(run, "SLID", 1)


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_checkpoint_of_every_family_is_right(preset, saved, clip, tmp_path, capsys, short):
    out = tmp_path / "out.json"
    folder = saved(preset)
    assert main(["models", "check", str(folder), "--clip", str(clip), "--json", str(out)]) == 0
    said = capsys.readouterr()
    assert f"right: {folder} ({PRESETS[preset].family}" in said.out
    assert "windows, against transformers" in said.err
    body = json.loads(out.read_text(), parse_constant=not_json)
    assert body["verdict"] == "right"
    assert [stage["name"] for stage in body["stages"]] == ["logits", "refresh", "reuse", "pruned", "answers", "speed"]
    logits, refresh, reuse = (stage["figures"]["relative"] for stage in body["stages"][:3])
    assert 0 < logits < 1e-4
    assert refresh < 1e-4
    # KV of frames whose past has left is an approximation: none would mean that nothing was reused.
    assert 1e-4 < reuse < 0.5
    assert body["config"]["model_type"] == PRESETS[preset].family
    assert body["machine"]["torch"]
    assert len(body["answers"]) == 5


def test_the_trained_model_answers_its_own_questions(clip, monkeypatch):
    # It is the bundled one, drawn already.
    monkeypatch.setattr(run, "draw_clip", lambda _: clip)
    steps = []
    report = run_check("demo", on_step=lambda what, done: steps.append((what, done)))
    assert not report.wrong
    assert [done for _, done in steps] == list(range(run.STEPS))
    (answers,) = [stage for stage in report.stages if stage.name == "answers"]
    assert answers.verdict == "right"
    assert answers.figures["known"] == 3 * 6
    assert answers.figures["right_full"] >= 16
    # Somebody falls at 10.5 s and stays down, and nothing else of what it knows happens.
    assert {(each.question, each.truth) for each in report.answers if each.truth} == {
        ("Is someone lying on the ground after a fall?", True)
    }
    assert (report.window_s, report.stride_s, report.clip) == (20.0, 4.0, "bundled")


def test_the_answers_that_a_person_would_give(clip):
    """By eye: somebody walks in at 7 s, falls at 10.5 s and stays, by day; the first car comes at 18 s."""
    asked = check_clip(clip, ModelSettings())
    assert [question.id for question in asked.spec.questions] == ["person", "vehicle", "fall", "night", "fire"]

    def answers(start_s, end_s):
        return [asked.answer(question.id, start_s, end_s) for question in asked.spec.questions]

    assert answers(4.0, 16.0) == [True, False, True, False, False]
    assert answers(12.0, 24.0) == [True, True, True, False, False]
    assert answers(0.0, 6.0) == [False, False, False, False, False]
    # Of a second of it, nobody could say.
    assert answers(0.0, 11.5)[2] is None
    # The clip's second round.
    assert answers(32.0, 44.0) == [None] * 5


def test_a_clip_without_truth(clip, saved, tmp_path, short):
    copy = tmp_path / "mine.mp4"
    copy.symlink_to(clip)
    copy.with_suffix(".json").write_text('{"not": "a scene"}')
    report = run_check(str(saved()), clip=copy)
    assert verdicts(report)["answers"] == "measured"
    assert {each.truth for each in report.answers} == {None}
    assert not report.wrong


@pytest.fixture
def broken(monkeypatch, clip, short):
    """``broken(spoil, name)``: the report on a model that ``spoil(model)`` changed after it was loaded."""

    def check(spoil, name="tiny-qwen2_5_vl"):
        def load(*arguments, **options):
            model = load_model(*arguments, **options)
            spoil(model)
            return model

        monkeypatch.setattr(run, "load_model", load)
        return run_check(name, clip=clip)

    return check


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrong_rope_theta_on_our_side(broken, name, monkeypatch):
    """Ours reads the frequencies that it was given, the library its own. The stages after the logits are left out."""
    monkeypatch.setattr(run, "against_fresh", lambda *_: iter(()))
    monkeypatch.setattr(run, "compare", lambda *_: ())

    def spoil(model):
        rope = model._text_model.rotary_emb
        rope.original_inv_freq = rope.inv_freq**0.8

    assert verdicts(broken(spoil, name))["logits"] == "wrong"


def test_a_permuted_matrix_on_our_side(broken):
    def spoil(model):
        encode, weight = model.encode, model.model.model.visual.merger.mlp[2].weight

        def permuted(frames):
            before = weight.clone()
            weight.copy_(before.roll(1, 0))
            try:
                return encode(frames)
            finally:
                weight.copy_(before)

        model.encode = permuted

    report = broken(spoil)
    assert verdicts(report)["logits"] == "wrong"
    # Windows with reuse and without are wrong alike.
    assert verdicts(report)["refresh"] == "right"
    assert "differ" in report.wrong[0].sentence


def test_embeddings_that_do_not_survive_a_window(broken, monkeypatch):
    step = NativeEngine.step

    def spoiling(engine, requests):
        answers = step(engine, requests)
        if requests[0].start > 0:
            for stream in engine._streams.values():
                for frame in stream.frames:
                    if frame.tokens is not None:
                        frame.tokens.embeds.neg_()
        return answers

    monkeypatch.setattr(NativeEngine, "step", spoiling)
    found = verdicts(broken(lambda model: None))
    assert (found["logits"], found["refresh"]) == ("right", "wrong")


def test_kv_that_does_not_survive_a_slide(broken, monkeypatch):
    drop = StreamKV.drop_slots

    def spoiling(kv, count):
        drop(kv, count)
        if count and len(kv.slots):
            kv.pool.v[:, kv.pool.index(kv.slots)] *= -1

    monkeypatch.setattr(StreamKV, "drop_slots", spoiling)
    found = verdicts(broken(lambda model: None))
    assert (found["logits"], found["refresh"], found["reuse"]) == ("right", "right", "wrong")


def test_pruned_frames_that_show_something_else(monkeypatch, clip, short):
    cut = run._frames

    def negative(*given):
        frames = cut(*given)
        return replace(frames, pruned=[replace(each, patches=255 - each.patches) for each in frames.pruned])

    monkeypatch.setattr(run, "_frames", negative)
    report = run_check("demo", clip=clip)
    found = verdicts(report)
    assert (found["logits"], found["refresh"], found["reuse"]) == ("right", "right", "right")
    assert {stage.name for stage in report.wrong} & {"pruned", "answers"}


def test_weights_that_are_not_finite(saved, clip, tmp_path, capsys, short):
    folder, out = saved(), tmp_path / "out.json"
    tensors = load_file(folder / "model.safetensors")
    tensors[next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight"))][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["models", "check", str(folder), "--clip", str(clip), "--json", str(out)]) == 1
    assert "wrong: " in capsys.readouterr().out
    body = json.loads(out.read_text(), parse_constant=not_json)
    assert body["verdict"] == "wrong"
    assert "the model computes NaN in float32" in body["stages"][0]["sentence"]


def test_a_forward_that_raises(broken):
    def spoil(model):
        def failing(*_):
            raise RuntimeError("no kernel\nfor this")

        model.reference_logits = failing

    report = broken(spoil)
    assert report.wrong[0].sentence == "failed: RuntimeError: no kernel"
    assert "in failing" in report.wrong[0].error
    found = verdicts(report)
    assert (found["logits"], found["refresh"], found["speed"]) == ("wrong", "right", "measured")


def asked(truth, full, pruned):
    return AskedWindow(0.0, 8.0, "?", truth, full, pruned, full >= 0.5, pruned >= 0.5)


@pytest.mark.parametrize(
    ("answers", "verdict", "lost"),
    [
        # Wrong in full as well, or right by pruning alone, or by a hair: pruning is not to blame.
        ([asked(True, 0.1, 0.2), asked(False, 0.9, 0.1), asked(True, 0.51, 0.49), asked(None, 0.9, 0.1)], "right", 0),
        # One of five that are right in full may be lost, two may not.
        ([asked(True, 0.9, 0.1), *[asked(True, 0.9, 0.8)] * 4], "right", 1),
        ([*[asked(True, 0.9, 0.1)] * 2, *[asked(True, 0.9, 0.8)] * 3], "wrong", 2),
    ],
)
def test_answers_lost_by_pruning(answers, verdict, lost):
    stage = run._answers_stage(answers, random_weights=False)
    assert (stage.verdict, stage.figures["lost"]) == (verdict, lost)
    assert run._answers_stage(answers, random_weights=True).verdict == "measured"


def test_a_clip_too_short_to_compare_is_not_called_infinite():
    stage = run._logit_stage("refresh", "windows that slid", iter(()), 1e-3)
    assert (stage.verdict, stage.sentence) == ("wrong", "windows that slid: nothing to compare")


def test_relative_difference_by_hand():
    """About its mean 2 the reference is (-1, 0, 1); the difference is (0, 0, 0.5)."""
    pair = LogitPair(torch.tensor([[1.0, 2.0, 3.5]]), torch.tensor([[1.0, 2.0, 3.0]]))
    assert pair.relative == pytest.approx(0.5 / 2**0.5)
    assert pair.largest == 0.5
