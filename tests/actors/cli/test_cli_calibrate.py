"""Incidents confirmed and rejected on the command line, and the thresholds that are proposed from them."""

import json
from dataclasses import replace

from gateway_parts import make_answer, served_in_thread

from actors.cli.calibrate import _proposals
from cluster.alerts.incident import Incident
from cluster.alerts.timeline_store import CameraTimeline, ScoreBin
from cluster.config.camera import QuestionConfig

QUESTIONS = [{"id": "person", "text": "Is anyone there?"}, {"id": "car", "text": "Is a car there?"}]


def test_thresholds_are_proposed_from_what_was_reviewed_and_saved(cli, tmp_path):
    with served_in_thread(tmp_path, cameras=1, live=False, alerts={"cooldown_s": 0}) as served:

        def run(*arguments, code=0):
            done = cli(*arguments, SIGHTLINE_GATEWAY=served.rpc)
            assert done.returncode == code, (done.stdout, done.stderr)
            return done.stdout + done.stderr

        asked = [flag for each in QUESTIONS for flag in ("-q", f"{each['id']}={each['text']}")]
        run("cameras", "add", "gate", *asked)
        said = run("cameras", "calibrate", "gate", code=1)
        assert "question 'person' has 0 confirmed or rejected incidents, and 5 are needed" in said
        assert said.count("review more with") == 1
        assert "no camera was asked" in run("ask", "--all", "Is anyone there?", "--camera", "gaet-*", code=1)
        levels = [0.52, 0.55, 0.6, 0.8, 0.9]
        for number, level in enumerate(levels):
            for step, score in enumerate((level, level, 0.0, 0.0)):
                served.alerts.accept_answer(make_answer("gate", "person", score, 5 * number + step))
        listed = json.loads(run("incidents", "list", "--camera", "gate", "--json", "-"))
        assert sorted(each["level"] for each in listed) == levels
        for each in listed:
            word = "confirm" if each["level"] > 0.7 else "reject"
            assert f"{word}ed by ann" in run("incidents", word, each["id"], "--by", "ann")
        assert len(json.loads(run("incidents", "list", "--verdict", "rejected", "--json", "-"))) == 3
        shown = run("cameras", "calibrate", "gate", "-q", "person")
        assert "0.700" in shown
        assert "proposed" in shown
        assert "repeat the command with `--apply` to save" in shown  # without its --keep it is another threshold
        assert "between 0.600, which was rejected, and 0.800, which was confirmed" in shown
        [proposal] = json.loads(run("cameras", "calibrate", "gate", "--json", "-"))
        now, *_ = proposal["trades"]
        assert (now["threshold"], now["opened"], now["avoided"]) == (0.5, 1, 0)
        assert "threshold of person is 0.700" in run("cameras", "calibrate", "gate", "--apply")
        written = served.world.entries["gate"].entry.questions
        assert {each.id: each.threshold for each in written} == {"person": 0.7, "car": 0.5}
        nowhere = "there is no camera 'gaet'"
        assert nowhere in run("incidents", "list", "--camera", "gaet", code=1)
        assert nowhere in run("incidents", "mute", "--camera", "gaet", "--for", "2h", code=1)
        assert nowhere in run("incidents", "follow", "gaet", code=1)
        undone = listed[0]["id"]
        assert "not reviewed" in run("incidents", "reject", undone, "--undo")
        assert "has no question 'boat'; it has: person, car" in run(
            "cameras", "calibrate", "gate", "-q", "boat", code=2
        )


class Timelines:
    """Of a client: no incidents but reviewed ones, and a minute that scores every five."""

    def incidents(self, camera, verdict, limit):
        known = {"kind": "question", "subject": "person", "severity": "info", "verdict": verdict, "level": 0.9}
        times = {"start": 0, "end": 1, "opened_s": 0.0, "updated_s": 0.0}
        return [Incident(str(n), camera, score=0.9, windows=1, **known, **times) for n in range(5)]

    def timeline(self, camera, since_s):
        bins = [ScoreBin(300.0 * n, 0.9, 0.9, 1, 1) for n in range(12)]
        return CameraTimeline({"person": bins, "car": bins}, [], cooldown_s=600.0)


def test_incidents_are_counted_with_the_clusters_cooldown_or_the_questions_own():
    asked = [QuestionConfig(**QUESTIONS[0]), QuestionConfig(**QUESTIONS[0], cooldown_s=60)]
    (cluster, own), missing = _proposals(Timelines(), "gate", asked, 0.0, 1.0)
    assert (cluster.trades[0].opened, own.trades[0].opened, missing) == (1, 12, [])


class Reworded(Timelines):
    def incidents(self, camera, verdict, limit):
        found = super().incidents(camera, verdict, limit)
        return [replace(each, question="Is a dog there?") for each in found[:3]] + found[3:]


def test_incidents_of_another_wording_of_the_question_do_not_count():
    asked = [QuestionConfig(**QUESTIONS[0])]
    found, [missing] = _proposals(Reworded(), "gate", asked, 0.0, 1.0)
    assert not found
    assert "has 4 confirmed or rejected incidents" in missing
